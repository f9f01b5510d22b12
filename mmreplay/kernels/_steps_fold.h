/* Rows around steps, found in one pass over flags; fields of them as columns; rewards
 * summed. steps.py says what `fold_steps`, `columns`, `weighted_sums`, `discounts` and `fold_fields`
 * do. */

/* Steps whose rows are found before the next ones are looked at. */
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
} Early;

/* Finds the slots of some steps, and asks for their flags, and for records where it
 * is known which. */
static int
near_some(const Folding *folding, const Early *early, Py_ssize_t begin, Py_ssize_t stop,
          Near *nears)
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
     * each other share a page, and are asked for sooner once its place is known. */
    for (int r = 0; r < early->count; r++) {
        const Reach reach = early->reaches[r];
        for (Py_ssize_t i = 0; i < stop - begin; i++) {
            int64_t row = row_near(&ring, nears[i].base, nears[i].slot, reach.distance);
            const char *from = early->records + (size_t)row * early->stride;
            ask_for(from + reach.offset, (size_t)reach.nbytes);
        }
    }
    return 0;
}

/* Looks at the flags around some steps, and says where their rows are. */
static void
fold_some(const Folding *folding, Py_ssize_t begin, Py_ssize_t stop, Near *nears)
{
    /* A copy: what is written may be anywhere, the original included. */
    const Folding f = *folding;
    const Ring ring = f.ring;
    const Py_ssize_t some = stop - begin;
    const int64_t *env_ids = f.env_ids + begin, *positions = f.positions + begin;
    int64_t *firsts = f.out + begin, *lasts = firsts + f.count, *nexts = lasts + f.count;
    for (Py_ssize_t i = 0; i < some; i++) {
        const int64_t base = nears[i].base, slot = nears[i].slot, place = positions[i];
        const int64_t left = f.heads[env_ids[i]] - place;
#define FLAGS(at) ((at) < left ? f.flags[row_near(&ring, base, slot, at)] : 0)
        int64_t back = 0, at = 0, most = f.before < place ? f.before : place;
        while (back < most && !(FLAGS(-back) & START))
            back++;
        unsigned here = FLAGS(0), after = FLAGS(1);
        while (at + 1 < f.steps && !(here & (TERMINATED | TRUNCATED)) &&
               !(after & (START | FINAL))) {
            at++;
            here = after;
            after = FLAGS(at + 1);
        }
#undef FLAGS
        int terminated = (here & TERMINATED) != 0;
        nears[i].first = -back;
        nears[i].last = at;
        nears[i].next = at + !(terminated && !(after & FINAL));
        nears[i].here = here;
        nears[i].after = after;
        firsts[i] = place - back;
        lasts[i] = place + at;
        nexts[i] = place + nears[i].next;
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
        uint8_t *told = f.ends + (1 + mark.start) * f.count + mark.at;
        told += begin * mark.width;
        if (column.ahead >= f.steps - 1 && column.back == 0 && !column.beyond) {
            /* The last step folded, whose flags were read above. */
            unsigned cut = mark.bit == TRUNCATED ? CUT : 0, bit = (unsigned)mark.bit;
            for (Py_ssize_t i = 0; i < some; i++, told += mark.width)
                *told = (nears[i].here & bit) || (nears[i].after & cut);
            continue;
        }
        for (Py_ssize_t i = 0; i < some; i++, told += mark.width) {
            const Near *near = &nears[i];
            int64_t left = f.heads[env_ids[i]] - positions[i];
            int64_t far = distance_of(near, &column);
            int64_t row = row_near(&ring, near->base, near->slot, far);
            int set = far < left && (f.flags[row] & mark.bit);
            if (mark.bit == TRUNCATED && !set && far + 1 < left) {
                row = row_near(&ring, near->base, near->slot, far + 1);
                set = (f.flags[row] & CUT) != 0;
            }
            *told = (uint8_t)(set != 0);
        }
    }
}

/* Whether [start, start + width) lies within [0, room), and at within the width. */
static inline int
fits_in(int64_t start, int64_t width, int64_t at, Py_ssize_t room)
{
    return start >= 0 && width >= 1 && width <= room && start <= room - width &&
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
read_folding(Held *held, PyObject *const *args, Folding *f)
{
    Py_ssize_t rows, places, envs, numbers, marks, room, bytes;
    if (read_ring(args + 4, &f->ring) < 0)
        return -1;
    f->before = PyLong_AsLongLong(args[7]);
    f->steps = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred() || !(f->flags = hold(held, args[0], 0, &rows, 1)) ||
        !(f->env_ids = hold(held, args[1], 0, &f->count, 8)) ||
        !(f->positions = hold(held, args[2], 0, &places, 8)) ||
        !(f->heads = hold(held, args[3], 0, &envs, 8)) ||
        !(f->columns = hold(held, args[9], 0, &numbers, 8)) ||
        !(f->marks = hold(held, args[10], 0, &marks, 8)) ||
        !(f->out = hold(held, args[11], 1, &room, 8)) ||
        !(f->ends = hold(held, args[12], 1, &bytes, 1)))
        return -1;
    f->num_columns = numbers / OF_COLUMN;
    f->num_marks = marks / OF_MARK;
    if (rows == f->ring.slots * f->ring.num_envs && f->count == places &&
        envs == f->ring.num_envs && numbers % OF_COLUMN == 0 && marks % OF_MARK == 0 &&
        f->before >= 0 && f->before < f->ring.slots && f->steps >= 1 &&
        f->steps < f->ring.slots && columns_fit(f) &&
        (f->count == 0 || room / f->count == 3 + f->num_columns) &&
        room == f->count * (3 + f->num_columns) &&
        (f->count == 0 || bytes / f->count == 1 + f->num_marks) &&
        bytes == f->count * (1 + f->num_marks))
        return 0;
    refuse(held, "expected flags of every row, a window that the ring holds, and room "
                 "for all");
    return -1;
}

static int
fold_all(const Folding *f)
{
    const Early none = {.count = 0};
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
fold_steps(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "fold_steps"};
    Folding f;
    (void)module;
    if (expect(held.name, given, 13) < 0 || read_folding(&held, args, &f) < 0)
        return release(&held, NULL);
    PyThreadState *state = f.count >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    int told = fold_all(&f);
    if (state)
        PyEval_RestoreThread(state);
    if (told < 0)
        return refuse(&held, STRAY);
    return release(&held, Py_NewRef(Py_None));
}

/* ---- columns ----------------------------------------------------------------- */

/* Lines of the first cache that may be on their way, half of it; and the most steps
 * whose records are looked at for one field before the next field is. */
enum { ASKED_LINES = 256, COLUMN_STEPS = 32, OF_FIELD = 5 };
/* Lines of a step's rows up to which they are asked for before its flags are looked
 * at: those of the steps of one go fit the second cache several times over. */
enum { EARLY_LINES = 24 };

typedef struct {
    int64_t offset, nbytes, start, width, place;
} FieldPart;

/* Bytes that do not overlap; what is short is copied without a call, the end of it
 * twice rather than byte by byte. */
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
copy_part(char *to, const char *from, const int64_t *rows, int64_t count,
          size_t nbytes, size_t stride)
{
    switch (nbytes) {
#define EACH(size)                                                                     \
    case size:                                                                         \
        for (int64_t i = 0; i < count; i++)                                            \
            memcpy(to + i * size, from + (size_t)rows[i] * stride, size);              \
        return
        EACH(1);
        EACH(2);
        EACH(4);
        EACH(8);
#undef EACH
    }
    for (int64_t i = 0; i < count; i++)
        copy_short(to + (size_t)i * nbytes, from + (size_t)rows[i] * stride, nbytes);
}

/* What of the records of some columns is asked for: fields of one row as one. */
typedef struct {
    int64_t start, width, offset, nbytes;
} Asking;

enum { MAX_ASKED = 16 };

static int
asked_of(const FieldPart *parts, Py_ssize_t num_parts, Asking *asked)
{
    int count = 0;
    for (Py_ssize_t p = 0; p < num_parts; p++) {
        const FieldPart *part = &parts[p];
        int at = 0;
        while (at < count && (asked[at].start != part->start ||
                              asked[at].width != part->width))
            at++;
        if (at == MAX_ASKED)
            break;
        if (at == count)
            asked[count++] = (Asking){part->start, part->width, part->offset,
                                      part->nbytes};
        int64_t end = asked[at].offset + asked[at].nbytes;
        int64_t until = part->offset + part->nbytes;
        if (part->offset < asked[at].offset)
            asked[at].offset = part->offset;
        asked[at].nbytes = (until > end ? until : end) - asked[at].offset;
    }
    return count;
}

static void
copy_columns(const char *records, size_t stride, const int64_t *rows, int64_t count,
             const FieldPart *parts, Py_ssize_t num_parts, char *out)
{
    Asking asked[MAX_ASKED];
    int num_asked = asked_of(parts, num_parts, asked);
    int64_t lines = 1, most = COLUMN_STEPS;
    for (int a = 0; a < num_asked; a++)
        lines += asked[a].width * (asked[a].nbytes / LINE + 1);
    if (lines > ASKED_LINES / COLUMN_STEPS)
        most = lines < ASKED_LINES / 4 ? ASKED_LINES / lines : 4;
    for (int64_t begin = -most; begin < count; begin += most) {
        int64_t next = begin + most;
        int64_t some = count - next < most ? count - next : most;
        for (int a = 0; a < num_asked && some > 0; a++) {
            const Asking ask = asked[a];
            const int64_t *wanted = rows + ask.start * count + next * ask.width;
            for (int64_t i = 0; i < some * ask.width; i++) {
                const char *from = records + (size_t)wanted[i] * stride + ask.offset;
                ask_for(from, (size_t)ask.nbytes);
            }
        }
        if (begin < 0)
            continue;
        some = count - begin < most ? count - begin : most;
        for (Py_ssize_t p = 0; p < num_parts; p++) {
            const FieldPart part = parts[p];
            int64_t first = begin * part.width;
            copy_part(out + part.place + first * part.nbytes, records + part.offset,
                      rows + part.start * count + first, some * part.width,
                      (size_t)part.nbytes, stride);
        }
    }
}

static int
fields_fit(const FieldPart *parts, Py_ssize_t num_parts, int64_t stride,
           int64_t count, Py_ssize_t num_rows, Py_ssize_t room)
{
    for (Py_ssize_t p = 0; p < num_parts; p++) {
        const FieldPart *part = &parts[p];
        if (part->offset < 0 || part->nbytes < 1 || part->nbytes > stride ||
            part->offset > stride - part->nbytes || part->start < 0 ||
            part->width < 1 || part->place < 0 || part->place > room)
            return 0;
        if (count == 0)
            continue;
        if (part->width > num_rows / count ||
            part->start > num_rows / count - part->width ||
            count * part->width > (room - part->place) / part->nbytes)
            return 0;
    }
    return 1;
}

static PyObject *
columns(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "columns"};
    Py_ssize_t nbytes, num_rows, numbers, room;
    (void)module;
    if (expect(held.name, given, 7) < 0)
        return NULL;
    int64_t stride = PyLong_AsLongLong(args[1]), count = PyLong_AsLongLong(args[3]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[6]);
    const char *records;
    const int64_t *rows;
    const FieldPart *parts;
    char *out;
    if (waits < 0 || !(records = hold(&held, args[0], 0, &nbytes, 1)) ||
        !(rows = hold(&held, args[2], 0, &num_rows, 8)) ||
        !(parts = hold(&held, args[4], 0, &numbers, 8)) ||
        !(out = hold(&held, args[5], 1, &room, 1)))
        return release(&held, NULL);
    if (stride < 1 || nbytes % stride || count < 0 || numbers % OF_FIELD ||
        !fields_fit(parts, numbers / OF_FIELD, stride, count, num_rows, room))
        return refuse(&held, "expected fields of records, and room for all");
    int64_t whole = nbytes / stride;
    for (Py_ssize_t i = 0; i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= whole)
            return refuse(&held, "expected rows of the ring");
    waits |= num_rows >= LONG_BATCH;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    copy_columns(records, (size_t)stride, rows, count, parts, numbers / OF_FIELD, out);
    if (state)
        PyEval_RestoreThread(state);
    return release(&held, Py_NewRef(Py_None));
}

/* Steps placed as `take` does, and fields of them, and of those after, as columns. */
static int
take_some_fields(const Placing *p, const Ring *ring, const char *records, size_t stride,
                 Py_ssize_t first, Py_ssize_t some, const FieldPart *parts,
                 Py_ssize_t num_parts, char *out)
{
    int64_t rows[2 * PLACED];
    int width = p->paired ? 2 : 1;
    Placing part = *p;
    part.env_ids += first;
    part.positions += first;
    part.count = some;
    part.out = rows;
    if (rows_of_all(&part, ring) < 0)
        return -1;
    part.ends += first;
    flags_of_all(&part);
    for (int64_t begin = -COLUMN_STEPS; begin < some; begin += COLUMN_STEPS) {
        int64_t next = begin + COLUMN_STEPS;
        int64_t until = next + COLUMN_STEPS < some ? next + COLUMN_STEPS : some;
        for (int64_t i = width * next; i < width * until; i++)
            ask_for(records + (size_t)rows[i] * stride, stride);
        if (begin < 0)
            continue;
        next = next < some ? next : some;
        for (Py_ssize_t f = 0; f < num_parts; f++) {
            const FieldPart field = parts[f];
            const size_t nbytes = (size_t)field.nbytes;
            const char *from = records + field.offset;
            char *to = out + field.place + (first + begin) * field.nbytes;
            for (int64_t i = begin; i < next; i++, to += nbytes) {
                int64_t row = rows[width * i + field.start];
                copy_short(to, from + (size_t)row * stride, nbytes);
            }
        }
    }
    return 0;
}

static PyObject *
take_fields(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "take_fields"};
    Placing p = {.out = NULL};
    Ring ring;
    Py_ssize_t nbytes, room, numbers;
    (void)module;
    if (expect(held.name, given, 16) < 0 || read_ring(args + 6, &ring) < 0)
        return NULL;
    Py_ssize_t stride = PyLong_AsSsize_t(args[1]);
    int64_t wide = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[11]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[15]);
    const char *records;
    const FieldPart *parts;
    char *out;
    if (waits < 0 || !(records = hold(&held, args[0], 0, &nbytes, 1)) ||
        read_placing(&held, args + 2, args[9], args[10], args[14], &ring, &p) < 0 ||
        !(parts = hold(&held, args[12], 0, &numbers, 8)) ||
        !(out = hold(&held, args[13], 1, &room, 1)))
        return release(&held, NULL);
    if (!fits_records(&ring, nbytes, stride) || (wide != 1 && wide != 2) ||
        numbers % OF_FIELD || p.count > PY_SSIZE_T_MAX / 2 ||
        !fields_fit(parts, numbers / OF_FIELD, stride, p.count, wide * p.count, room))
        return refuse(&held, "expected fields of every row, and room for all");
    for (Py_ssize_t f = 0; f < numbers / OF_FIELD; f++)
        if (parts[f].width != 1 || parts[f].start >= wide)
            return refuse(&held, "expected fields of every row, and room for all");
    p.paired = wide == 2;
    waits |= p.count >= LONG_BATCH;
    int told = 0;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t first = 0; first < p.count && told == 0; first += PLACED) {
        Py_ssize_t some = p.count - first < PLACED ? p.count - first : PLACED;
        told = take_some_fields(&p, &ring, records, (size_t)stride, first, some, parts,
                                numbers / OF_FIELD, out);
    }
    if (state)
        PyEval_RestoreThread(state);
    if (told < 0)
        return refuse(&held, STRAY);
    return release(&held, Py_NewRef(Py_None));
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
    Py_ssize_t count, most;
} Folded;

static int
read_folded(Held *held, PyObject *const *args, Folded *f)
{
    Py_ssize_t places;
    if (!(f->positions = hold(held, args[0], 0, &f->count, 8)) ||
        !(f->lasts = hold(held, args[1], 0, &places, 8)) ||
        !(f->powers = hold(held, args[2], 0, &f->most, 8)))
        return -1;
    if (f->count == places)
        return 0;
    refuse(held, "expected a last step for each");
    return -1;
}

static PyObject *
weighted_sums(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "weighted_sums"};
    Folded f;
    Py_ssize_t nbytes, room;
    (void)module;
    if (expect(held.name, given, 7) < 0)
        return NULL;
    int64_t wide = PyLong_AsLongLong(args[4]), wide_out = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || read_folded(&held, args, &f) < 0)
        return release(&held, NULL);
    const char *values = hold(&held, args[3], 0, &nbytes, 1);
    char *out = values == NULL ? NULL : hold(&held, args[5], 1, &room, 1);
    if (out == NULL)
        return release(&held, NULL);
    if ((wide != 4 && wide != 8) || (wide_out != 4 && wide_out != 8) || f.most < 1 ||
        room % wide_out || nbytes % wide || (f.count == 0 && (room || nbytes)) ||
        (f.count && (room / wide_out % f.count ||
                     nbytes / wide / f.most != room / wide_out ||
                     nbytes / wide % f.most)))
        return refuse(&held, "expected a number of each step folded, and room for all");
    Py_ssize_t width = f.count ? room / wide_out / f.count : 0;
    for (Py_ssize_t i = 0; i < f.count; i++)
        if (f.lasts[i] < f.positions[i] || f.lasts[i] - f.positions[i] >= f.most)
            return refuse(&held, "expected last steps among those folded");
    for (Py_ssize_t i = 0; i < f.count; i++) {
        Py_ssize_t steps = (Py_ssize_t)(f.lasts[i] - f.positions[i]) + 1;
        for (Py_ssize_t w = 0; w < width; w++) {
            double total = 0.0;
            for (Py_ssize_t k = 0; k < steps; k++) {
                Py_ssize_t at = (i * f.most + k) * width + w;
                total += f.powers[k] * number_at(values + wide * at, wide);
            }
            put_number(out + wide_out * (i * width + w), wide_out, total);
        }
    }
    return release(&held, Py_NewRef(Py_None));
}

static PyObject *
discounts(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "discounts"};
    Folded f;
    Py_ssize_t ends, room;
    (void)module;
    if (expect(held.name, given, 5) < 0)
        return NULL;
    if (read_folded(&held, args, &f) < 0)
        return release(&held, NULL);
    const uint8_t *terminated = hold(&held, args[3], 0, &ends, 1);
    float *out = terminated == NULL ? NULL : hold(&held, args[4], 1, &room, 4);
    if (out == NULL)
        return release(&held, NULL);
    if (ends != f.count || room != f.count)
        return refuse(&held, "expected room for a number of each step");
    for (Py_ssize_t i = 0; i < f.count; i++) {
        if (f.lasts[i] < f.positions[i] || f.lasts[i] - f.positions[i] >= f.most - 1)
            return refuse(&held, "expected last steps among those folded");
        double power = f.powers[f.lasts[i] - f.positions[i] + 1];
        out[i] = terminated[i] ? 0.0f : (float)power;
    }
    return release(&held, Py_NewRef(Py_None));
}

/* ---- all of it --------------------------------------------------------------- */

/* Numbers of a field that is summed, as steps.py has them. */
typedef struct {
    int64_t offset, numbers, wide, wide_out, start, place;
} SumPart;

enum { OF_SUM = 6 };

/* What `fold_fields` copies and sums, and where it goes; discount is less than 0 where
 * none is asked for. */
typedef struct {
    const char *records;
    size_t stride;
    const FieldPart *parts;
    const SumPart *sums;
    Py_ssize_t num_parts, num_sums;
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
sums_fit(const Filling *g, const Folding *f, Py_ssize_t room)
{
    for (Py_ssize_t s = 0; s < g->num_sums; s++) {
        const SumPart *sum = &g->sums[s];
        int64_t stride = (int64_t)g->stride;
        if ((sum->wide != 4 && sum->wide != 8) ||
            (sum->wide_out != 4 && sum->wide_out != 8) || sum->numbers < 1 ||
            sum->numbers > stride / sum->wide || sum->offset < 0 ||
            sum->offset > stride - sum->numbers * sum->wide ||
            !together(f, sum->start, f->steps) || sum->place < 0 ||
            sum->place > room ||
            (f->count &&
             sum->numbers * sum->wide_out > (room - sum->place) / f->count))
            return 0;
    }
    return g->discount < 0 ||
           (g->discount <= room && (room - g->discount) / 4 >= f->count);
}

/* Which bytes are read near each step, those of one row as one; none where there are
 * too many of them to be asked for before flags are looked at. */
static void
early_of(const Filling *g, const Folding *f, Early *early)
{
    int64_t lines = 0;
    early->records = g->records;
    early->stride = g->stride;
    early->count = 0;
    for (Py_ssize_t p = 0; p < g->num_parts + g->num_sums; p++) {
        FieldPart part;
        if (p < g->num_parts)
            part = g->parts[p];
        else {
            const SumPart *sum = &g->sums[p - g->num_parts];
            part = (FieldPart){sum->offset, sum->numbers * sum->wide, sum->start,
                               f->steps, 0};
        }
        for (int64_t c = part.start; c < part.start + part.width; c++) {
            int64_t distance = f->columns[c].ahead - f->columns[c].back;
            int at = 0;
            while (at < early->count && early->reaches[at].distance != distance)
                at++;
            if (at == MAX_REACHES) {
                early->count = 0;
                return;
            }
            Reach *reach = &early->reaches[at];
            if (at == early->count) {
                early->count++;
                *reach = (Reach){distance, part.offset, part.nbytes};
                continue;
            }
            int64_t end = reach->offset + reach->nbytes;
            int64_t until = part.offset + part.nbytes;
            if (part.offset < reach->offset)
                reach->offset = part.offset;
            reach->nbytes = (until > end ? until : end) - reach->offset;
        }
    }
    for (int r = 0; r < early->count; r++)
        lines += early->reaches[r].nbytes / LINE + 1;
    if (lines > EARLY_LINES)
        early->count = 0;
}

static void
fill_some(const Filling *filling, const Folding *f, Py_ssize_t begin, Py_ssize_t stop)
{
    /* A copy: what is written may be anywhere, the original included. */
    const Filling g = *filling;
    const int64_t *rows = f->out + 3 * f->count;
    for (Py_ssize_t p = 0; p < g.num_parts; p++) {
        const FieldPart part = g.parts[p];
        int64_t first = begin * part.width;
        copy_part(g.out + part.place + first * part.nbytes, g.records + part.offset,
                  rows + part.start * f->count + first, (stop - begin) * part.width,
                  (size_t)part.nbytes, g.stride);
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
        const SumPart sum = g.sums[s];
        const int64_t *rows = f.out + (3 + sum.start) * f.count + begin * f.steps;
        char *to = g.out + sum.place + begin * sum.numbers * sum.wide_out;
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
    Early early;
    Near nears[2][FOLDED];
    early_of(g, f, &early);
    if (early.count == 0) {
        if (fold_all(f) < 0)
            return -1;
        copy_columns(g->records, g->stride, f->out + 3 * f->count, f->count, g->parts,
                     g->num_parts, g->out);
        sum_some(g, f, 0, f->count);
        return 0;
    }
    /* While some steps are folded and copied, what the next ones need is on its way. */
    for (Py_ssize_t begin = -FOLDED; begin < f->count; begin += FOLDED) {
        Py_ssize_t next = begin + FOLDED, stop = next < f->count ? next : f->count;
        Py_ssize_t until = f->count - next < FOLDED ? f->count : next + FOLDED;
        if (next < f->count &&
            near_some(f, &early, next, until, nears[next / FOLDED % 2]) < 0)
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
fold_fields(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "fold_fields"};
    Folding f;
    Filling g;
    Py_ssize_t nbytes, parts, sums, powers, room;
    (void)module;
    if (expect(held.name, given, 21) < 0 || read_folding(&held, args + 2, &f) < 0)
        return release(&held, NULL);
    Py_ssize_t stride = PyLong_AsSsize_t(args[1]);
    g.discount = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[18]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[20]);
    if (waits < 0 || !(g.records = hold(&held, args[0], 0, &nbytes, 1)) ||
        !(g.parts = hold(&held, args[15], 0, &parts, 8)) ||
        !(g.sums = hold(&held, args[16], 0, &sums, 8)) ||
        !(g.powers = hold(&held, args[17], 0, &powers, 8)) ||
        !(g.out = hold(&held, args[19], 1, &room, 1)))
        return release(&held, NULL);
    g.stride = (size_t)stride;
    g.num_parts = parts / OF_FIELD;
    g.num_sums = sums / OF_SUM;
    if (!fits_records(&f.ring, nbytes, stride) || parts % OF_FIELD || sums % OF_SUM ||
        ((sums || g.discount >= 0) && powers != f.steps + 1) ||
        !fields_fit(g.parts, g.num_parts, stride, f.count, f.num_columns * f.count,
                    room) ||
        !sums_fit(&g, &f, room))
        return refuse(&held, "expected fields of every row, and room for all");
    for (Py_ssize_t p = 0; p < g.num_parts; p++)
        if (!together(&f, g.parts[p].start, g.parts[p].width))
            return refuse(&held, "expected fields of every row, and room for all");
    waits |= f.count >= LONG_BATCH;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    int told = fold_and_fill(&f, &g);
    if (state)
        PyEval_RestoreThread(state);
    if (told < 0)
        return refuse(&held, STRAY);
    return release(&held, Py_NewRef(Py_None));
}
