/* Rows around steps, found in one pass over flags; fields of them as columns; rewards
 * summed. steps.py says what `fold`, `columns`, `sums` and `discounts` do. */

/* Steps whose rows are found before the next ones are looked at. */
enum { FOLDED = 128 };
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

/* How far a column's row is from a step, and where it lies. */
typedef struct {
    int64_t base, slot, first, last, next;
} Near;

static inline int64_t
distance_of(const Near *near, const Column *column)
{
    int64_t cap = column->beyond ? near->next : near->last;
    int64_t far = (column->ahead < cap ? column->ahead : cap) - column->back;
    return far > near->first ? far : near->first;
}

static int
fold_some(const Folding *folding, Py_ssize_t begin, Py_ssize_t stop)
{
    /* A copy: what is written may be anywhere, the original included. */
    const Folding f = *folding;
    const Ring ring = f.ring;
    const Py_ssize_t some = stop - begin;
    const int64_t *env_ids = f.env_ids + begin, *positions = f.positions + begin;
    Near nears[FOLDED];
    for (Py_ssize_t i = 0; i < some; i++) {
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
        firsts[i] = place - back;
        lasts[i] = place + at;
        nexts[i] = place + nears[i].next;
        f.ends[begin + i] = (uint8_t)terminated;
    }
    for (Py_ssize_t c = 0; c < f.num_columns; c++) {
        const Column column = f.columns[c];
        int64_t *rows = f.out + (3 + column.start) * f.count + column.at;
        rows += begin * column.width;
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
    return 0;
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

static PyObject *
fold(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "fold"};
    Folding f;
    Py_ssize_t rows, places, envs, numbers, marks, room, bytes;
    (void)module;
    if (expect(held.name, given, 13) < 0 || read_ring(args + 4, &f.ring) < 0)
        return NULL;
    f.before = PyLong_AsLongLong(args[7]);
    f.steps = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[8]);
    if (PyErr_Occurred() || !(f.flags = hold(&held, args[0], 0, &rows, 1)) ||
        !(f.env_ids = hold(&held, args[1], 0, &f.count, 8)) ||
        !(f.positions = hold(&held, args[2], 0, &places, 8)) ||
        !(f.heads = hold(&held, args[3], 0, &envs, 8)) ||
        !(f.columns = hold(&held, args[9], 0, &numbers, 8)) ||
        !(f.marks = hold(&held, args[10], 0, &marks, 8)) ||
        !(f.out = hold(&held, args[11], 1, &room, 8)) ||
        !(f.ends = hold(&held, args[12], 1, &bytes, 1)))
        return release(&held, NULL);
    f.num_columns = numbers / OF_COLUMN;
    f.num_marks = marks / OF_MARK;
    if (rows != f.ring.slots * f.ring.num_envs || f.count != places ||
        envs != f.ring.num_envs || numbers % OF_COLUMN || marks % OF_MARK ||
        f.before < 0 || f.before >= f.ring.slots || f.steps < 1 ||
        f.steps >= f.ring.slots || !columns_fit(&f) ||
        (f.count && room / f.count != 3 + f.num_columns) ||
        room != f.count * (3 + f.num_columns) ||
        (f.count && bytes / f.count != 1 + f.num_marks) ||
        bytes != f.count * (1 + f.num_marks))
        return refuse(&held, "expected flags of every row, a window that the ring "
                             "holds, and room for all");
    int told = 0;
    PyThreadState *state = f.count >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t first = 0; first < f.count && told == 0; first += FOLDED) {
        Py_ssize_t stop = f.count - first < FOLDED ? f.count : first + FOLDED;
        told = fold_some(&f, first, stop);
    }
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
    Py_ssize_t most = PY_SSIZE_T_MAX / (ring.slots * ring.num_envs);
    if (stride < 1 || stride > most || nbytes != stride * ring.slots * ring.num_envs ||
        (wide != 1 && wide != 2) || numbers % OF_FIELD ||
        p.count > PY_SSIZE_T_MAX / 2 ||
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
sums(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "sums"};
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
                double value;
                if (wide == 8)
                    memcpy(&value, values + 8 * at, 8);
                else {
                    float narrow;
                    memcpy(&narrow, values + 4 * at, 4);
                    value = (double)narrow;
                }
                total += f.powers[k] * value;
            }
            if (wide_out == 8)
                memcpy(out + 8 * (i * width + w), &total, 8);
            else {
                float narrow = (float)total;
                memcpy(out + 4 * (i * width + w), &narrow, 4);
            }
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
