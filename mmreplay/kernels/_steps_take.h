/* Steps placed and their records copied out; steps.py says what `take` does.
 *
 * Records are not fetched ahead: what copies one waits for several at a time anyway,
 * and asking for their lines before made 256 of them take a sixth longer. */

/* Steps placed before the first of their records is copied. */
enum { PLACED = 256 };

typedef struct {
    const char *records;
    char *out;
    size_t stride;
} Taking;

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
    char *to = t->out + (size_t)(width * first) * t->stride;
    for (Py_ssize_t i = 0; i < width * some; i++, to += t->stride)
        memcpy(to, t->records + (size_t)rows[i] * t->stride, t->stride);
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
    Py_ssize_t nbytes, room, most;
    (void)module;
    if (expect(held.name, given, 13) < 0 || read_ring(args + 6, &ring) < 0)
        return NULL;
    Py_ssize_t stride = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || !(t.records = hold(&held, args[0], 0, &nbytes, 1)) ||
        read_placing(&held, args + 2, args[9], args[10], args[12], &ring, &p) < 0 ||
        !(t.out = hold(&held, args[11], 1, &room, 1)))
        return release(&held, NULL);
    t.stride = (size_t)stride;
    most = PY_SSIZE_T_MAX / (ring.slots * ring.num_envs);
    if (stride < 1 || stride > most || nbytes != stride * ring.slots * ring.num_envs ||
        room % stride || !(room / stride == p.count || room / stride == 2 * p.count))
        return refuse(&held, "expected whole records of every row, and room for all");
    p.paired = room / stride == 2 * p.count;
    PyThreadState *state = p.count >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    int told = take_all(&p, &ring, &t);
    if (state)
        PyEval_RestoreThread(state);
    if (told < 0)
        return refuse(&held, STRAY);
    return release(&held, Py_NewRef(Py_None));
}
