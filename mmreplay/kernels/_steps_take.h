/* Steps located and their records copied out; steps.py says what `take` does.
 *
 * Records are prefetched into the second cache, which saves a sixth of the time. The
 * first cache would not have them sooner: it waits for few lines at a time, and copying
 * one record after the other already keeps it busy. */

/* Steps located before the first of their records is copied. */
enum { LOOKUP_STEPS = 256 };
/* Records between the prefetched one and the copied one, and how much of one is
 * prefetched: processors by themselves continue in longer ones. */
enum { AHEAD = 48, PREFETCHED_NBYTES = 512, LINE = 64 };

typedef struct {
    const char *records;
    char *out;
    size_t stride;
} RecordCopy;

static inline void
prefetch_record(const char *record, size_t stride)
{
    size_t nbytes = stride < PREFETCHED_NBYTES ? stride : PREFETCHED_NBYTES;
    for (size_t at = 0; at < nbytes; at += LINE)
        __builtin_prefetch(record + at, 0, 2);
    __builtin_prefetch(record + nbytes - 1, 0, 2);
}

static void
copy_all(const RecordCopy *copying, const int64_t *rows, Py_ssize_t count, char *to)
{
    /* A copy: what is written may be anywhere, the original included. */
    const RecordCopy t = *copying;
    for (Py_ssize_t i = 0; i < count && i < AHEAD; i++)
        prefetch_record(t.records + (size_t)rows[i] * t.stride, t.stride);
    for (Py_ssize_t i = 0; i < count; i++, to += t.stride) {
        if (i + AHEAD < count)
            prefetch_record(t.records + (size_t)rows[i + AHEAD] * t.stride, t.stride);
        memcpy(to, t.records + (size_t)rows[i] * t.stride, t.stride);
    }
}

static int
take_some(const RowLookup *p, const Ring *ring, const RecordCopy *t, Py_ssize_t first,
          Py_ssize_t some)
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
    copy_all(t, rows, width * some, t->out + (size_t)(width * first) * t->stride);
    return 0;
}

static int
take_all(const RowLookup *p, const Ring *ring, const RecordCopy *t)
{
    for (Py_ssize_t first = 0; first < p->count; first += LOOKUP_STEPS) {
        Py_ssize_t left = p->count - first, some = left < LOOKUP_STEPS ? left : LOOKUP_STEPS;
        if (take_some(p, ring, t, first, some) < 0)
            return -1;
    }
    return 0;
}

static PyObject *
take(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "take"};
    RowLookup p = {.out = NULL};
    RecordCopy t;
    Ring ring;
    Py_ssize_t nbytes, out_nbytes;
    (void)module;
    if (expect(buffers.name, nargs, 14) < 0 || read_ring(args + 6, &ring) < 0)
        return NULL;
    Py_ssize_t stride = PyLong_AsSsize_t(args[1]);
    int waits = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[13]);
    if (waits < 0 || !(t.records = acquire(&buffers, args[0], 0, &nbytes, 1)) ||
        read_lookup(&buffers, args + 2, args[9], args[10], args[12], &ring, &p) < 0 ||
        !(t.out = acquire(&buffers, args[11], 1, &out_nbytes, 1)))
        return release(&buffers, NULL);
    t.stride = (size_t)stride;
    if (!fits_records(&ring, nbytes, stride) || out_nbytes % stride ||
        !(out_nbytes / stride == p.count || out_nbytes / stride == 2 * p.count))
        return refuse(&buffers, "records must have every row, and out must hold all");
    p.paired = out_nbytes / stride == 2 * p.count;
    waits |= p.count >= LONG_BATCH;
    PyThreadState *state = waits ? PyEval_SaveThread() : NULL;
    int status = take_all(&p, &ring, &t);
    if (state)
        PyEval_RestoreThread(state);
    if (status < 0)
        return refuse(&buffers, STRAY);
    return release(&buffers, Py_NewRef(Py_None));
}
