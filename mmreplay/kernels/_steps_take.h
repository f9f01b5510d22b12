/* Steps placed and their records copied out; steps.py says what `take` does.
 *
 * Records are asked for ahead, into the second cache, which saves a sixth of the time.
 * Asked for into the first they come no sooner: it waits for few lines at a time, and
 * copying one record after the other keeps it at that by itself. */

/* Steps placed before the first of their records is copied. */
enum { PLACED = 256 };
/* Records between the one asked for and the one copied, and how much is asked for of
 * one: processors by themselves go on reading what is longer. */
enum { AHEAD = 48, ASKED_NBYTES = 512, LINE = 64 };

typedef struct {
    const char *records;
    char *out;
    size_t stride;
} Taking;

static inline void
ask_for(const char *record, size_t stride)
{
    size_t nbytes = stride < ASKED_NBYTES ? stride : ASKED_NBYTES;
    for (size_t at = 0; at < nbytes; at += LINE)
        __builtin_prefetch(record + at, 0, 2);
    __builtin_prefetch(record + nbytes - 1, 0, 2);
}

static void
copy_all(const Taking *taking, const int64_t *rows, Py_ssize_t count, char *to)
{
    /* A copy: what is written may be anywhere, the original included. */
    const Taking t = *taking;
    for (Py_ssize_t i = 0; i < count && i < AHEAD; i++)
        ask_for(t.records + (size_t)rows[i] * t.stride, t.stride);
    for (Py_ssize_t i = 0; i < count; i++, to += t.stride) {
        if (i + AHEAD < count)
            ask_for(t.records + (size_t)rows[i + AHEAD] * t.stride, t.stride);
        memcpy(to, t.records + (size_t)rows[i] * t.stride, t.stride);
    }
}

static int
take_some(const Placing *p, const Ring *ring, const Taking *t, Py_ssize_t first,
          Py_ssize_t some)
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
    copy_all(t, rows, width * some, t->out + (size_t)(width * first) * t->stride);
    return 0;
}

static int
take_all(const Placing *p, const Ring *ring, const Taking *t)
{
    for (Py_ssize_t first = 0; first < p->count; first += PLACED) {
        Py_ssize_t some = p->count - first < PLACED ? p->count - first : PLACED;
        if (take_some(p, ring, t, first, some) < 0)
            return -1;
    }
    return 0;
}

static PyObject *
take(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "take"};
    Placing p = {.out = NULL};
    Taking t;
    Ring ring;
    Py_ssize_t nbytes, room;
    (void)module;
    if (expect(held.name, given, 14) < 0 || read_ring(args + 6, &ring) < 0)
        return NULL;
    Py_ssize_t stride = PyLong_AsSsize_t(args[1]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[13]);
    if (waits < 0 || !(t.records = hold(&held, args[0], 0, &nbytes, 1)) ||
        read_placing(&held, args + 2, args[9], args[10], args[12], &ring, &p) < 0 ||
        !(t.out = hold(&held, args[11], 1, &room, 1)))
        return release(&held, NULL);
    t.stride = (size_t)stride;
    if (!fits_records(&ring, nbytes, stride) || room % stride ||
        !(room / stride == p.count || room / stride == 2 * p.count))
        return refuse(&held, "expected whole records of every row, and room for all");
    p.paired = room / stride == 2 * p.count;
    waits |= p.count >= LONG_BATCH;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    int told = take_all(&p, &ring, &t);
    if (state)
        PyEval_RestoreThread(state);
    if (told < 0)
        return refuse(&held, STRAY);
    return release(&held, Py_NewRef(Py_None));
}
