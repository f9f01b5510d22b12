/* Rows around steps, found in one pass over flags; fields of them as columns; rewards
 * summed. steps.py says what `fold_steps`, `columns`, `weighted_sums`, `discounts` and
 * `fold_fields` do. */

/* Steps whose rows are found before those of the next steps. */
enum { FOLDED = 32 };
/* Numbers of a column and of a mark, as steps.py has them. */
enum { OF_COLUMN = 6, OF_MARK = 5 };

typedef struct {
    int64_t ahead, back, beyond, start, width, at;
} Column;

typedef struct {
    int64_t column, bit, start, width, at;
} Mark;

typedef struct {
    const uint8_t *flags;
    const int64_t *env_ids, *positions, *heads;
    const Column *columns;
    const Mark *marks;
    Py_ssize_t count, num_columns, num_marks;
    int64_t before, steps;
    /* first, last and following of each step, then the rows of columns. */
    int64_t *out;
    /* Which steps terminate, then what marks say. */
    uint8_t *ends;
    Ring ring;
} Folding;

/* Row of a position so far from one whose slot is known: at most a lap. */
static inline int64_t
row_near(const Ring *ring, int64_t base, int64_t slot, int64_t distance)
{
    slot += distance;
    if (slot < 0)
        slot += ring->slots;
    else if (slot >= ring->slots)
        slot -= ring->slots;
    return base + slot * ring->of_slot;
}

/* Where a step lies, and how far from it the first row, the last step folded and the
 * row with the next observation are; flags of that last step and of the row after. */
typedef struct {
    int64_t base, slot, first, last, next;
    unsigned here, after;
} Near;

static inline int64_t
distance_of(const Near *near, const Column *column)
{
    int64_t cap = column->beyond ? near->next : near->last;
    int64_t far = (column->ahead < cap ? column->ahead : cap) - column->back;
    return far > near->first ? far : near->first;
}

/* Bytes of a record that are read at a distance from a step, unless its episode
 * begins or ends before. */
typedef struct {
    int64_t distance, offset, nbytes;
} Reach;

enum { MAX_REACHES = 16 };

typedef struct {
    const char *records;
    size_t stride;
    Reach reaches[MAX_REACHES];
    int count;
} Prefetch;

/* Finds the slots of some steps, and prefetches their flags, and their records where it
 * is known which. */
static int
near_some(const Folding *folding, const Prefetch *prefetch, Py_ssize_t begin,
          Py_ssize_t stop, Near *nears)
{
    /* Copies: what is written may be anywhere, the originals included. */
    const Folding f = *folding;
    const Ring ring = f.ring;
    const int64_t *env_ids = f.env_ids + begin, *positions = f.positions + begin;
    for (Py_ssize_t i = 0; i < stop - begin; i++) {
        if (outside(&ring, env_ids[i], positions[i]) ||
            positions[i] > INT64_MAX - f.steps - 1)
            return -1;
        int64_t slot = slot_of(&ring, positions[i]), base = env_ids[i] * ring.of_env;
        nears[i].base = base;
        nears[i].slot = slot;
        if (ring.of_slot == 1) {
            /* The flags lie together: most often in one line, or in two. */
            FETCH(f.flags + row_near(&ring, base, slot, -f.before));
            FETCH(f.flags + row_near(&ring, base, slot, f.steps));
        }
        else
            for (int64_t at = -f.before; at <= f.steps; at++)
                FETCH(f.flags + row_near(&ring, base, slot, at));
    }
    /* One row of each step after the other, not one step after the other: rows near
     * each other share a page, and come sooner once its address is known. */
    for (int r = 0; r < prefetch->count; r++) {
        const Reach reach = prefetch->reaches[r];
        for (Py_ssize_t i = 0; i < stop - begin; i++) {
            int64_t row = row_near(&ring, nears[i].base, nears[i].slot, reach.distance);
            const char *from = prefetch->records + (size_t)row * prefetch->stride;
            prefetch_record(from + reach.offset, (size_t)reach.nbytes);
        }
    }
    return 0;
}

/* Reads the flags around some steps, and finds their rows. */
static void
fold_some(const Folding *folding, Py_ssize_t begin, Py_ssize_t stop, Near *nears)
{
    /* A copy: what is written may be anywhere, the original included. */
    const Folding f = *folding;
    const Ring ring = f.ring;
    const Py_ssize_t some = stop - begin;
    const int64_t *env_ids = f.env_ids + begin, *positions = f.positions + begin;
    int64_t *firsts = f.out + begin, *lasts = firsts + f.count;
    int64_t *following = lasts + f.count;
    for (Py_ssize_t i = 0; i < some; i++) {
        const int64_t base = nears[i].base, slot = nears[i].slot, position = positions[i];
        const int64_t left = f.heads[env_ids[i]] - position;
#define FLAGS(at) ((at) < left ? f.flags[row_near(&ring, base, slot, at)] : 0)
        int64_t back = 0, at = 0, max_back = f.before < position ? f.before : position;
        while (back < max_back && !(FLAGS(-back) & START))
            back++;
        unsigned here = FLAGS(0), after = FLAGS(1);
        while (at + 1 < f.steps && !(here & (TERMINATED | TRUNCATED)) &&
               !(after & (START | FINAL))) {
            at++;
            here = after;
            after = FLAGS(at + 1);
        }
#undef FLAGS
        int terminated = (here & TERMINATED) != 0, bare = !(after & FINAL);
        int ended = (here & TRUNCATED) || (after & START);
        nears[i].first = -back;
        nears[i].last = at;
        nears[i].next = terminated && bare ? at : ended && bare ? 0 : at + 1;
        nears[i].here = here;
        nears[i].after = after;
        firsts[i] = position - back;
        lasts[i] = position + at;
        following[i] = position + nears[i].next;
        f.ends[begin + i] = (uint8_t)terminated;
    }
    for (Py_ssize_t c = 0; c < f.num_columns; c++) {
        const Column column = f.columns[c];
        int64_t *rows = f.out + (3 + column.start) * f.count + column.at;
        rows += begin * column.width;
        if (column.ahead == 0 && column.back == 0) {
            /* The step's own row, of which no end is before or after. */
            for (Py_ssize_t i = 0; i < some; i++, rows += column.width)
                *rows = nears[i].base + nears[i].slot * ring.of_slot;
            continue;
        }
        for (Py_ssize_t i = 0; i < some; i++) {
            int64_t far = distance_of(&nears[i], &column);
            *rows = row_near(&ring, nears[i].base, nears[i].slot, far);
            rows += column.width;
        }
    }
    for (Py_ssize_t m = 0; m < f.num_marks; m++) {
        const Mark mark = f.marks[m];
        const Column column = f.columns[mark.column];
        uint8_t *marked = f.ends + (1 + mark.start) * f.count + mark.at;
        marked += begin * mark.width;
        if (column.ahead >= f.steps - 1 && column.back == 0 && !column.beyond) {
            /* The last step folded, whose flags were read above. */
            unsigned cut_flag = mark.bit == TRUNCATED ? CUT : 0, bit = (unsigned)mark.bit;
            for (Py_ssize_t i = 0; i < some; i++, marked += mark.width)
                *marked = (nears[i].here & bit) || (nears[i].after & cut_flag);
            continue;
        }
        for (Py_ssize_t i = 0; i < some; i++, marked += mark.width) {
            const Near *near = &nears[i];
            int64_t left = f.heads[env_ids[i]] - positions[i];
            int64_t far = distance_of(near, &column);
            int64_t row = row_near(&ring, near->base, near->slot, far);
            int is_set = far < left && (f.flags[row] & mark.bit);
            if (mark.bit == TRUNCATED && !is_set && far + 1 < left) {
                row = row_near(&ring, near->base, near->slot, far + 1);
                is_set = (f.flags[row] & CUT) != 0;
            }
            *marked = (uint8_t)(is_set != 0);
        }
    }
}

/* Whether [start, start + width) lies within [0, size), and at within the width. */
static inline int
fits_in(int64_t start, int64_t width, int64_t at, Py_ssize_t size)
{
    return start >= 0 && width >= 1 && width <= size && start <= size - width &&
           at >= 0 && at < width;
}

static int
columns_fit(const Folding *f)
{
    for (Py_ssize_t c = 0; c < f->num_columns; c++) {
        const Column *column = &f->columns[c];
        if (column->ahead < 0 || column->ahead > f->steps || column->back < 0 ||
            column->back > f->ring.slots ||
            !fits_in(column->start, column->width, column->at, f->num_columns))
            return 0;
    }
    for (Py_ssize_t m = 0; m < f->num_marks; m++) {
        const Mark *mark = &f->marks[m];
        if (mark->column < 0 || mark->column >= f->num_columns || mark->bit < 0 ||
            mark->bit > UINT8_MAX ||
            !fits_in(mark->start, mark->width, mark->at, f->num_marks))
            return 0;
    }
    return 1;
}

/* Flags to ends, as `fold_steps` is given them. */
static int
read_folding(Buffers *buffers, PyObject *const *args, Folding *f)
{
    Py_ssize_t rows, num_positions, envs, numbers, marks, out_count, bytes;
    if (read_ring(args + 4, &f->ring) < 0)
        return -1;
    f->before = PyLong_AsLongLong(args[7]);
    f->steps = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred() || !(f->flags = acquire(buffers, args[0], 0, &rows, 1)) ||
        !(f->env_ids = acquire(buffers, args[1], 0, &f->count, 8)) ||
        !(f->positions = acquire(buffers, args[2], 0, &num_positions, 8)) ||
        !(f->heads = acquire(buffers, args[3], 0, &envs, 8)) ||
        !(f->columns = acquire(buffers, args[9], 0, &numbers, 8)) ||
        !(f->marks = acquire(buffers, args[10], 0, &marks, 8)) ||
        !(f->out = acquire(buffers, args[11], 1, &out_count, 8)) ||
        !(f->ends = acquire(buffers, args[12], 1, &bytes, 1)))
        return -1;
    f->num_columns = numbers / OF_COLUMN;
    f->num_marks = marks / OF_MARK;
    if (rows == f->ring.slots * f->ring.num_envs && f->count == num_positions &&
        envs == f->ring.num_envs && numbers % OF_COLUMN == 0 && marks % OF_MARK == 0 &&
        f->before >= 0 && f->before < f->ring.slots && f->steps >= 1 &&
        f->steps < f->ring.slots && columns_fit(f) &&
        (f->count == 0 || out_count / f->count == 3 + f->num_columns) &&
        out_count == f->count * (3 + f->num_columns) &&
        (f->count == 0 || bytes / f->count == 1 + f->num_marks) &&
        bytes == f->count * (1 + f->num_marks))
        return 0;
    refuse(buffers, "flags must have every row, the ring the window, and out "
           "all steps");
    return -1;
}

static int
fold_all(const Folding *f)
{
    const Prefetch none = {.count = 0};
    Near nears[FOLDED];
    for (Py_ssize_t first = 0; first < f->count; first += FOLDED) {
        Py_ssize_t stop = f->count - first < FOLDED ? f->count : first + FOLDED;
        if (near_some(f, &none, first, stop, nears) < 0)
            return -1;
        fold_some(f, first, stop, nears);
    }
    return 0;
}

static PyObject *
fold_steps(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "fold_steps"};
    Folding f;
    (void)module;
    if (expect(buffers.name, nargs, 13) < 0 || read_folding(&buffers, args, &f) < 0)
        return release(&buffers, NULL);
    PyThreadState *state = f.count >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    int status = fold_all(&f);
    if (state)
        PyEval_RestoreThread(state);
    if (status < 0)
        return refuse(&buffers, STRAY);
    return release(&buffers, Py_NewRef(Py_None));
}

/* ---- columns ----------------------------------------------------------------- */

/* Lines that may be prefetched at once, half of the first cache; and the number of steps
 * whose one field is copied before the next field. */
enum { MAX_PREFETCHED_LINES = 256, COLUMN_STEPS = 32, OF_FIELD = 5 };
/* Lines of a step's rows up to which they are prefetched before its flags are read: the
 * second cache holds several times those of FOLDED steps. */
enum { PREFETCH_LINES = 24 };

typedef struct {
    int64_t offset, nbytes, start, width, out_start;
} OutField;

/* Copies bytes that do not overlap; few bytes without a call, the last ones twice rather
 * than byte by byte. */
static inline void
copy_short(char *to, const char *from, size_t nbytes)
{
    if (nbytes >= 16 && nbytes <= 256) {
        size_t at = 0;
        for (; at + 16 <= nbytes; at += 16)
            memcpy(to + at, from + at, 16);
        if (at < nbytes)
            memcpy(to + nbytes - 16, from + nbytes - 16, 16);
    }
    else if (nbytes >= 8 && nbytes < 16) {
        memcpy(to, from, 8);
        memcpy(to + nbytes - 8, from + nbytes - 8, 8);
    }
    else
        memcpy(to, from, nbytes);
}

static void
copy_field(char *to, const char *from, const int64_t *rows, int64_t count,
           size_t nbytes, size_t stride)
{
    switch (nbytes) {
#define COPY_SIZE(size)                                                                \
    case size:                                                                         \
        for (int64_t i = 0; i < count; i++)                                            \
            memcpy(to + i * size, from + (size_t)rows[i] * stride, size);              \
        return
        COPY_SIZE(1);
        COPY_SIZE(2);
        COPY_SIZE(4);
        COPY_SIZE(8);
#undef COPY_SIZE
    }
    for (int64_t i = 0; i < count; i++)
        copy_short(to + (size_t)i * nbytes, from + (size_t)rows[i] * stride, nbytes);
}

/* Bytes of the records of some columns that are prefetched: fields of one row as one
 * range. */
typedef struct {
    int64_t start, width, offset, nbytes;
} PrefetchRange;

enum { MAX_RANGES = 16 };

static int
find_ranges(const OutField *fields, Py_ssize_t num_fields, PrefetchRange *ranges)
{
    int count = 0;
    for (Py_ssize_t p = 0; p < num_fields; p++) {
        const OutField *field = &fields[p];
        int at = 0;
        while (at < count && (ranges[at].start != field->start ||
                              ranges[at].width != field->width))
            at++;
        if (at == MAX_RANGES)
            break;
        if (at == count)
            ranges[count++] = (PrefetchRange){field->start, field->width, field->offset,
                                              field->nbytes};
        int64_t end = ranges[at].offset + ranges[at].nbytes;
        int64_t until = field->offset + field->nbytes;
        if (field->offset < ranges[at].offset)
            ranges[at].offset = field->offset;
        ranges[at].nbytes = (until > end ? until : end) - ranges[at].offset;
    }
    return count;
}

static void
copy_columns(const char *records, size_t stride, const int64_t *rows, int64_t count,
             const OutField *fields, Py_ssize_t num_fields, char *out)
{
    PrefetchRange ranges[MAX_RANGES];
    int num_ranges = find_ranges(fields, num_fields, ranges);
    int64_t lines = 1, max_steps = COLUMN_STEPS;
    for (int a = 0; a < num_ranges; a++)
        lines += ranges[a].width * (ranges[a].nbytes / LINE + 1);
    if (lines > MAX_PREFETCHED_LINES / COLUMN_STEPS)
        max_steps = lines < MAX_PREFETCHED_LINES / 4 ? MAX_PREFETCHED_LINES / lines : 4;
    for (int64_t begin = -max_steps; begin < count; begin += max_steps) {
        int64_t next = begin + max_steps;
        int64_t some = count - next < max_steps ? count - next : max_steps;
        for (int a = 0; a < num_ranges && some > 0; a++) {
            const PrefetchRange range = ranges[a];
            const int64_t *wanted = rows + range.start * count + next * range.width;
            for (int64_t i = 0; i < some * range.width; i++) {
                const char *from = records + (size_t)wanted[i] * stride + range.offset;
                prefetch_record(from, (size_t)range.nbytes);
            }
        }
        if (begin < 0)
            continue;
        some = count - begin < max_steps ? count - begin : max_steps;
        for (Py_ssize_t p = 0; p < num_fields; p++) {
            const OutField field = fields[p];
            int64_t first = begin * field.width;
            copy_field(out + field.out_start + first * field.nbytes,
                       records + field.offset,
                       rows + field.start * count + first, some * field.width,
                       (size_t)field.nbytes, stride);
        }
    }
}

static int
fields_fit(const OutField *fields, Py_ssize_t num_fields, int64_t stride,
           int64_t count, Py_ssize_t num_rows, Py_ssize_t out_nbytes)
{
    for (Py_ssize_t p = 0; p < num_fields; p++) {
        const OutField *field = &fields[p];
        if (field->offset < 0 || field->nbytes < 1 || field->nbytes > stride ||
            field->offset > stride - field->nbytes || field->start < 0 ||
            field->width < 1 || field->out_start < 0 || field->out_start > out_nbytes)
            return 0;
        if (count == 0)
            continue;
        if (field->width > num_rows / count ||
            field->start > num_rows / count - field->width ||
            count * field->width > (out_nbytes - field->out_start) / field->nbytes)
            return 0;
    }
    return 1;
}

static PyObject *
columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "columns"};
    Py_ssize_t nbytes, num_rows, numbers, out_nbytes;
    (void)module;
    if (expect(buffers.name, nargs, 7) < 0)
        return NULL;
    int64_t stride = PyLong_AsLongLong(args[1]), count = PyLong_AsLongLong(args[3]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[6]);
    const char *records;
    const int64_t *rows;
    const OutField *fields;
    char *out;
    if (waits < 0 || !(records = acquire(&buffers, args[0], 0, &nbytes, 1)) ||
        !(rows = acquire(&buffers, args[2], 0, &num_rows, 8)) ||
        !(fields = acquire(&buffers, args[4], 0, &numbers, 8)) ||
        !(out = acquire(&buffers, args[5], 1, &out_nbytes, 1)))
        return release(&buffers, NULL);
    if (stride < 1 || nbytes % stride || count < 0 || numbers % OF_FIELD ||
        !fields_fit(fields, numbers / OF_FIELD, stride, count, num_rows, out_nbytes))
        return refuse(&buffers, "fields must be in the records, and out must hold all");
    int64_t num_records = nbytes / stride;
    for (Py_ssize_t i = 0; i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= num_records)
            return refuse(&buffers, "rows must be in the ring");
    waits |= num_rows >= LONG_BATCH;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    copy_columns(records, (size_t)stride, rows, count, fields, numbers / OF_FIELD, out);
    if (state)
        PyEval_RestoreThread(state);
    return release(&buffers, Py_NewRef(Py_None));
}

/* Locates steps as `take` does, and copies fields of them, and of those after, as
 * columns. */
static int
take_some_fields(const RowLookup *p, const Ring *ring, const char *records, size_t stride,
                 Py_ssize_t first, Py_ssize_t some, const OutField *fields,
                 Py_ssize_t num_fields, char *out)
{
    int64_t rows[2 * LOOKUP_STEPS];
    int width = p->paired ? 2 : 1;
    RowLookup slice = *p;
    slice.env_ids += first;
    slice.positions += first;
    slice.count = some;
    slice.out = rows;
    if (rows_of_all(&slice, ring) < 0)
        return -1;
    slice.ends += first;
    flags_of_all(&slice);
    for (int64_t begin = -COLUMN_STEPS; begin < some; begin += COLUMN_STEPS) {
        int64_t next = begin + COLUMN_STEPS;
        int64_t until = next + COLUMN_STEPS < some ? next + COLUMN_STEPS : some;
        for (int64_t i = width * next; i < width * until; i++)
            prefetch_record(records + (size_t)rows[i] * stride, stride);
        if (begin < 0)
            continue;
        next = next < some ? next : some;
        for (Py_ssize_t f = 0; f < num_fields; f++) {
            const OutField field = fields[f];
            const size_t nbytes = (size_t)field.nbytes;
            const char *from = records + field.offset;
            char *to = out + field.out_start + (first + begin) * field.nbytes;
            for (int64_t i = begin; i < next; i++, to += nbytes) {
                int64_t row = rows[width * i + field.start];
                copy_short(to, from + (size_t)row * stride, nbytes);
            }
        }
    }
    return 0;
}

static PyObject *
take_fields(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "take_fields"};
    RowLookup p = {.out = NULL};
    Ring ring;
    Py_ssize_t nbytes, out_nbytes, numbers;
    (void)module;
    if (expect(buffers.name, nargs, 16) < 0 || read_ring(args + 6, &ring) < 0)
        return NULL;
    Py_ssize_t stride = PyLong_AsSsize_t(args[1]);
    int64_t wide = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[11]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[15]);
    const char *records;
    const OutField *fields;
    char *out;
    if (waits < 0 || !(records = acquire(&buffers, args[0], 0, &nbytes, 1)) ||
        read_lookup(&buffers, args + 2, args[9], args[10], args[14], &ring, &p) < 0 ||
        !(fields = acquire(&buffers, args[12], 0, &numbers, 8)) ||
        !(out = acquire(&buffers, args[13], 1, &out_nbytes, 1)))
        return release(&buffers, NULL);
    if (!fits_records(&ring, nbytes, stride) || (wide != 1 && wide != 2) ||
        numbers % OF_FIELD || p.count > PY_SSIZE_T_MAX / 2 ||
        !fields_fit(fields, numbers / OF_FIELD, stride, p.count, wide * p.count,
                    out_nbytes))
        return refuse(&buffers, "fields and out must have every row");
    for (Py_ssize_t f = 0; f < numbers / OF_FIELD; f++)
        if (fields[f].width != 1 || fields[f].start >= wide)
            return refuse(&buffers, "fields and out must have every row");
    p.paired = wide == 2;
    waits |= p.count >= LONG_BATCH;
    int status = 0;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t first = 0; first < p.count && status == 0; first += LOOKUP_STEPS) {
        Py_ssize_t some = p.count - first < LOOKUP_STEPS ? p.count - first : LOOKUP_STEPS;
        status = take_some_fields(&p, &ring, records, (size_t)stride, first, some, fields,
                                  numbers / OF_FIELD, out);
    }
    if (state)
        PyEval_RestoreThread(state);
    if (status < 0)
        return refuse(&buffers, STRAY);
    return release(&buffers, Py_NewRef(Py_None));
}

/* ---- rewards ----------------------------------------------------------------- */

static inline double
number_at(const char *from, int64_t wide)
{
    double value;
    float narrow;
    if (wide == 8) {
        memcpy(&value, from, 8);
        return value;
    }
    memcpy(&narrow, from, 4);
    return (double)narrow;
}

static inline void
put_number(char *to, int64_t wide, double value)
{
    float narrow = (float)value;
    if (wide == 8)
        memcpy(to, &value, 8);
    else
        memcpy(to, &narrow, 4);
}

typedef struct {
    const int64_t *positions, *lasts;
    const double *powers;
    Py_ssize_t count, num_powers;
} Folded;

static int
read_folded(Buffers *buffers, PyObject *const *args, Folded *f)
{
    Py_ssize_t num_lasts;
    if (!(f->positions = acquire(buffers, args[0], 0, &f->count, 8)) ||
        !(f->lasts = acquire(buffers, args[1], 0, &num_lasts, 8)) ||
        !(f->powers = acquire(buffers, args[2], 0, &f->num_powers, 8)))
        return -1;
    if (f->count == num_lasts)
        return 0;
    refuse(buffers, "each position must have a last step");
    return -1;
}

static PyObject *
weighted_sums(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "weighted_sums"};
    Folded f;
    Py_ssize_t nbytes, out_nbytes;
    (void)module;
    if (expect(buffers.name, nargs, 7) < 0)
        return NULL;
    int64_t wide = PyLong_AsLongLong(args[4]), wide_out = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || read_folded(&buffers, args, &f) < 0)
        return release(&buffers, NULL);
    const char *values = acquire(&buffers, args[3], 0, &nbytes, 1);
    char *out = values == NULL ? NULL : acquire(&buffers, args[5], 1, &out_nbytes, 1);
    if (out == NULL)
        return release(&buffers, NULL);
    if ((wide != 4 && wide != 8) || (wide_out != 4 && wide_out != 8) || f.num_powers < 1 ||
        out_nbytes % wide_out || nbytes % wide ||
        (f.count == 0 && (out_nbytes || nbytes)) ||
        (f.count && (out_nbytes / wide_out % f.count ||
                     nbytes / wide / f.num_powers != out_nbytes / wide_out ||
                     nbytes / wide % f.num_powers)))
        return refuse(&buffers, "each folded step must have a number, and out must "
                      "hold all");
    Py_ssize_t width = f.count ? out_nbytes / wide_out / f.count : 0;
    for (Py_ssize_t i = 0; i < f.count; i++)
        if (f.lasts[i] < f.positions[i] || f.lasts[i] - f.positions[i] >= f.num_powers)
            return refuse(&buffers, "last steps must be among the folded ones");
    for (Py_ssize_t i = 0; i < f.count; i++) {
        Py_ssize_t steps = (Py_ssize_t)(f.lasts[i] - f.positions[i]) + 1;
        for (Py_ssize_t w = 0; w < width; w++) {
            double total = 0.0;
            for (Py_ssize_t k = 0; k < steps; k++) {
                Py_ssize_t at = (i * f.num_powers + k) * width + w;
                total += f.powers[k] * number_at(values + wide * at, wide);
            }
            put_number(out + wide_out * (i * width + w), wide_out, total);
        }
    }
    return release(&buffers, Py_NewRef(Py_None));
}

static PyObject *
discounts(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "discounts"};
    Folded f;
    Py_ssize_t ends, out_count;
    (void)module;
    if (expect(buffers.name, nargs, 5) < 0)
        return NULL;
    if (read_folded(&buffers, args, &f) < 0)
        return release(&buffers, NULL);
    const uint8_t *terminated = acquire(&buffers, args[3], 0, &ends, 1);
    float *out = terminated == NULL ? NULL : acquire(&buffers, args[4], 1, &out_count, 4);
    if (out == NULL)
        return release(&buffers, NULL);
    if (ends != f.count || out_count != f.count)
        return refuse(&buffers, "out must hold a number for each step");
    for (Py_ssize_t i = 0; i < f.count; i++) {
        if (f.lasts[i] < f.positions[i] || f.lasts[i] - f.positions[i] >= f.num_powers - 1)
            return refuse(&buffers, "last steps must be among the folded ones");
        double power = f.powers[f.lasts[i] - f.positions[i] + 1];
        out[i] = terminated[i] ? 0.0f : (float)power;
    }
    return release(&buffers, Py_NewRef(Py_None));
}

/* ---- all of it --------------------------------------------------------------- */

/* Numbers of a field that is summed, as steps.py has them. */
typedef struct {
    int64_t offset, numbers, wide, wide_out, start, out_start;
} SumField;

enum { OF_SUM = 6 };

/* What `fold_fields` copies and sums, and where it goes; discount is less than 0 if none
 * is wanted. */
typedef struct {
    const char *records;
    size_t stride;
    const OutField *fields;
    const SumField *sums;
    Py_ssize_t num_fields, num_sums;
    const double *powers;
    int64_t discount;
    char *out;
} Filling;

/* Whether so many columns lie together, so that all rows of a step are known at once,
 * and none stays what it was before. */
static int
together(const Folding *f, int64_t start, int64_t width)
{
    if (!fits_in(start, width, 0, f->num_columns))
        return 0;
    for (int64_t at = 0; at < width; at++) {
        const Column *column = &f->columns[start + at];
        if (column->start != start || column->width != width || column->at != at)
            return 0;
    }
    return 1;
}

static int
sums_fit(const Filling *g, const Folding *f, Py_ssize_t out_nbytes)
{
    for (Py_ssize_t s = 0; s < g->num_sums; s++) {
        const SumField *sum = &g->sums[s];
        int64_t stride = (int64_t)g->stride;
        if ((sum->wide != 4 && sum->wide != 8) ||
            (sum->wide_out != 4 && sum->wide_out != 8) || sum->numbers < 1 ||
            sum->numbers > stride / sum->wide || sum->offset < 0 ||
            sum->offset > stride - sum->numbers * sum->wide ||
            !together(f, sum->start, f->steps) || sum->out_start < 0 ||
            sum->out_start > out_nbytes ||
            (f->count &&
             sum->numbers * sum->wide_out > (out_nbytes - sum->out_start) / f->count))
            return 0;
    }
    return g->discount < 0 ||
           (g->discount <= out_nbytes && (out_nbytes - g->discount) / 4 >= f->count);
}

/* Finds the bytes that are read near each step, those of one row as one range; none where
 * they are too many to be prefetched before the flags are read. */
static void
plan_prefetch(const Filling *g, const Folding *f, Prefetch *prefetch)
{
    int64_t lines = 0;
    prefetch->records = g->records;
    prefetch->stride = g->stride;
    prefetch->count = 0;
    for (Py_ssize_t p = 0; p < g->num_fields + g->num_sums; p++) {
        OutField field;
        if (p < g->num_fields)
            field = g->fields[p];
        else {
            const SumField *sum = &g->sums[p - g->num_fields];
            field = (OutField){sum->offset, sum->numbers * sum->wide, sum->start,
                               f->steps, 0};
        }
        for (int64_t c = field.start; c < field.start + field.width; c++) {
            int64_t distance = f->columns[c].ahead - f->columns[c].back;
            int at = 0;
            while (at < prefetch->count && prefetch->reaches[at].distance != distance)
                at++;
            if (at == MAX_REACHES) {
                prefetch->count = 0;
                return;
            }
            Reach *reach = &prefetch->reaches[at];
            if (at == prefetch->count) {
                prefetch->count++;
                *reach = (Reach){distance, field.offset, field.nbytes};
                continue;
            }
            int64_t end = reach->offset + reach->nbytes;
            int64_t until = field.offset + field.nbytes;
            if (field.offset < reach->offset)
                reach->offset = field.offset;
            reach->nbytes = (until > end ? until : end) - reach->offset;
        }
    }
    for (int r = 0; r < prefetch->count; r++)
        lines += prefetch->reaches[r].nbytes / LINE + 1;
    if (lines > PREFETCH_LINES)
        prefetch->count = 0;
}

static void
fill_some(const Filling *filling, const Folding *f, Py_ssize_t begin, Py_ssize_t stop)
{
    /* A copy: what is written may be anywhere, the original included. */
    const Filling g = *filling;
    const int64_t *rows = f->out + 3 * f->count;
    for (Py_ssize_t p = 0; p < g.num_fields; p++) {
        const OutField field = g.fields[p];
        int64_t first = begin * field.width;
        copy_field(g.out + field.out_start + first * field.nbytes,
                   g.records + field.offset,
                   rows + field.start * f->count + first, (stop - begin) * field.width,
                   (size_t)field.nbytes, g.stride);
    }
}

static void
sum_some(const Filling *filling, const Folding *folding, Py_ssize_t begin,
         Py_ssize_t stop)
{
    /* Copies: what is written may be anywhere, the originals included. */
    const Filling g = *filling;
    const Folding f = *folding;
    const int64_t *lasts = f.out + f.count;
    for (Py_ssize_t s = 0; s < g.num_sums; s++) {
        const SumField sum = g.sums[s];
        const int64_t *rows = f.out + (3 + sum.start) * f.count + begin * f.steps;
        char *to = g.out + sum.out_start + begin * sum.numbers * sum.wide_out;
        for (Py_ssize_t i = begin; i < stop; i++, rows += f.steps) {
            int64_t steps = lasts[i] - f.positions[i] + 1;
            for (int64_t w = 0; w < sum.numbers; w++, to += sum.wide_out) {
                const char *from = g.records + sum.offset + w * sum.wide;
                double total = 0.0;
                for (int64_t k = 0; k < steps; k++) {
                    const char *number = from + (size_t)rows[k] * g.stride;
                    total += g.powers[k] * number_at(number, sum.wide);
                }
                put_number(to, sum.wide_out, total);
            }
        }
    }
    if (g.discount < 0)
        return;
    for (Py_ssize_t i = begin; i < stop; i++) {
        double power = g.powers[lasts[i] - f.positions[i] + 1];
        put_number(g.out + g.discount + 4 * i, 4, f.ends[i] ? 0.0 : power);
    }
}

static int
fold_and_fill(const Folding *f, const Filling *g)
{
    Prefetch prefetch;
    Near nears[2][FOLDED];
    plan_prefetch(g, f, &prefetch);
    if (prefetch.count == 0) {
        if (fold_all(f) < 0)
            return -1;
        copy_columns(g->records, g->stride, f->out + 3 * f->count, f->count, g->fields,
                     g->num_fields, g->out);
        sum_some(g, f, 0, f->count);
        return 0;
    }
    /* While some steps are folded and copied, the bytes of the next ones come. */
    for (Py_ssize_t begin = -FOLDED; begin < f->count; begin += FOLDED) {
        Py_ssize_t next = begin + FOLDED, stop = next < f->count ? next : f->count;
        Py_ssize_t until = f->count - next < FOLDED ? f->count : next + FOLDED;
        if (next < f->count &&
            near_some(f, &prefetch, next, until, nears[next / FOLDED % 2]) < 0)
            return -1;
        if (begin < 0)
            continue;
        fold_some(f, begin, stop, nears[begin / FOLDED % 2]);
        fill_some(g, f, begin, stop);
        sum_some(g, f, begin, stop);
    }
    return 0;
}

static PyObject *
fold_fields(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "fold_fields"};
    Folding f;
    Filling g;
    Py_ssize_t nbytes, field_numbers, sums, powers, out_nbytes;
    (void)module;
    if (expect(buffers.name, nargs, 21) < 0 || read_folding(&buffers, args + 2, &f) < 0)
        return release(&buffers, NULL);
    Py_ssize_t stride = PyLong_AsSsize_t(args[1]);
    g.discount = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[18]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[20]);
    if (waits < 0 || !(g.records = acquire(&buffers, args[0], 0, &nbytes, 1)) ||
        !(g.fields = acquire(&buffers, args[15], 0, &field_numbers, 8)) ||
        !(g.sums = acquire(&buffers, args[16], 0, &sums, 8)) ||
        !(g.powers = acquire(&buffers, args[17], 0, &powers, 8)) ||
        !(g.out = acquire(&buffers, args[19], 1, &out_nbytes, 1)))
        return release(&buffers, NULL);
    g.stride = (size_t)stride;
    g.num_fields = field_numbers / OF_FIELD;
    g.num_sums = sums / OF_SUM;
    if (!fits_records(&f.ring, nbytes, stride) || field_numbers % OF_FIELD ||
        sums % OF_SUM ||
        ((sums || g.discount >= 0) && powers != f.steps + 1) ||
        !fields_fit(g.fields, g.num_fields, stride, f.count, f.num_columns * f.count,
                    out_nbytes) ||
        !sums_fit(&g, &f, out_nbytes))
        return refuse(&buffers, "fields and out must have every row");
    for (Py_ssize_t p = 0; p < g.num_fields; p++)
        if (!together(&f, g.fields[p].start, g.fields[p].width))
            return refuse(&buffers, "fields and out must have every row");
    waits |= f.count >= LONG_BATCH;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    int status = fold_and_fill(&f, &g);
    if (state)
        PyEval_RestoreThread(state);
    if (status < 0)
        return refuse(&buffers, STRAY);
    return release(&buffers, Py_NewRef(Py_None));
}
