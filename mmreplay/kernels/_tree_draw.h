/* Leaves drawn by the numbers of a step, and values to be set for drawn ones; tree.py
 * says what each function does. */

/* Bits of a float64 beyond the 24 that are left. */
#define DROPPED_BITS 29

static void draw_all(const double *nodes, const Levels *l, double *shares, int stratified,
                     double scale, int64_t *indices, double *ratios, Py_ssize_t n) {
    double total = nodes[0], minimum = INFINITY;
    for (Py_ssize_t i = 0; i < n; i++) {
        double sum = stratified ? (shares[i] + (double)i) / (double)n : shares[i];
        shares[i] = sum * total;
    }
    find_all(nodes, l, shares, indices, ratios, n);
    for (Py_ssize_t i = 0; i < n; i++) {
        shares[i] = ratios[i] / total;
        minimum = ratios[i] < minimum ? ratios[i] : minimum;
    }
    scale = scale > 0 ? scale : minimum;
    for (Py_ssize_t i = 0; i < n; i++) ratios[i] = scale / ratios[i];
}

static PyObject *py_draw(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {.count = 0};
    (void)self;
    if (count != 7) return refuse(&a, "draw_leaves takes 7 arguments");
    int stratified = PyObject_IsTrue(args[3]);
    double scale = PyFloat_AsDouble(args[4]);
    PyObject *const rest[] = {args[2], args[5], args[6]};
    if (PyErr_Occurred() || take(&a, args[0], args[1], rest, 3, 14) < 0)
        return refuse(&a, MISFIT);
    Py_ssize_t n = LENGTH(a);
    const double *nodes = a.views[0].buf;
    double *shares = a.views[1].buf;
    PyThreadState *state = n >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    Py_ssize_t bad = nodes[0] > 0 ? improper(shares, n, 0, 1) : n > 0 ? 0 : -1;
    if (bad < 0)
        draw_all(nodes, &a.levels, shares, stratified, scale, a.views[2].buf,
                 a.views[3].buf, n);
    if (state) PyEval_RestoreThread(state);
    release(&a);
    return PyLong_FromSsize_t(bad);
}

static PyObject *py_add(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {.count = 0};
    (void)self;
    if (count != 6) return refuse(&a, "add_to_open takes 6 arguments");
    double more = PyFloat_AsDouble(args[4]);
    PyObject *const rest[] = {args[2], args[5]};
    if (PyErr_Occurred() || take(&a, args[0], args[1], rest, 2, 4) < 0)
        return refuse(&a, MISFIT);
    Py_ssize_t n = LENGTH(a), capacity = a.levels.count[a.levels.depth];
    Py_buffer *column = &a.views[a.count];
    if (PyObject_GetBuffer(args[3], column, PyBUF_SIMPLE) < 0) return refuse(&a, MISFIT);
    a.count++;
    if (column->len / 4 < capacity) return refuse(&a, MISFIT);
    const int64_t *indices = a.views[1].buf;
    const double *leaves = (const double *)a.views[0].buf + a.levels.offset[a.levels.depth];
    double *out = a.views[2].buf;
    const float *numbers = column->buf;
    int open = 1;
    for (Py_ssize_t i = 0; open && i < n; i++) {
        /* Read once: another thread may change it between a check and its use. */
        int64_t index = *(const volatile int64_t *)(indices + i);
        if ((uint64_t)index >= (uint64_t)capacity || !(leaves[index] > 0))
            open = 0;
        else
            out[i] = (double)numbers[index] + more;
    }
    release(&a);
    return PyBool_FromLong(open);
}

static PyObject *py_shorten(PyObject *self, PyObject *array) {
    Arguments a = {.count = 0};
    (void)self;
    if (acquire(&a, array, 1) < 0) return refuse(&a, "shorten takes a float64 array");
    Py_ssize_t n = a.views[0].len / 8;
    unsigned char *values = a.views[0].buf;
    PyThreadState *state = n >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, values + 8 * i, sizeof bits);
        bits += UINT64_C(1) << (DROPPED_BITS - 1);
        bits &= -(UINT64_C(1) << DROPPED_BITS);
        memcpy(values + 8 * i, &bits, sizeof bits);
    }
    if (state) PyEval_RestoreThread(state);
    release(&a);
    Py_RETURN_NONE;
}
