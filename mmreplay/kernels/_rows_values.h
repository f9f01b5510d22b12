/* Values that vary: summed, measured and joined; values.py says what each does. */

static int
spans_inside(const int64_t *begins, const int64_t *nbytes, Py_ssize_t count,
             Py_ssize_t there)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (nbytes[i] < 0 || begins[i] < 0 || begins[i] > there ||
            nbytes[i] > there - begins[i])
            return 0;
    return 1;
}

static PyObject *
sum_spans(PyObject *module, PyObject *args)
{
    enum { DATA, BEGINS, NBYTES, OUT, NUM_ARRAYS };
    PyObject *arrays[NUM_ARRAYS], *result = NULL;
    Py_buffer views[NUM_ARRAYS];
    int acquired = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO:sum_spans", &arrays[DATA], &arrays[BEGINS],
                          &arrays[NBYTES], &arrays[OUT]))
        return NULL;
    while (acquired < NUM_ARRAYS &&
           contiguous(arrays[acquired], &views[acquired], acquired == OUT) == 0)
        acquired++;
    if (acquired == NUM_ARRAYS) {
        const unsigned char *data = views[DATA].buf;
        const int64_t *begins = views[BEGINS].buf, *nbytes = views[NBYTES].buf;
        uint32_t *out = views[OUT].buf;
        Py_ssize_t count = views[BEGINS].len / 8;
        if (views[NBYTES].len != 8 * count || views[OUT].len != 4 * count ||
            !spans_inside(begins, nbytes, count, views[DATA].len))
            PyErr_Format(PyExc_ValueError,
                         "sum_spans: spans must lie inside of data, and out must hold "
                         "their sums");
        else {
            PyThreadState *state =
                views[DATA].len > LENGTHY ? PyEval_SaveThread() : NULL;
            for (Py_ssize_t i = 0; i < count; i++)
                out[i] = nbytes[i] ? ~fold(~(uint32_t)0, data + begins[i],
                                           (size_t)nbytes[i])
                                   : 0;
            if (state)
                PyEval_RestoreThread(state);
            result = Py_NewRef(Py_None);
        }
    }
    while (acquired--)
        PyBuffer_Release(&views[acquired]);
    return result;
}

/* An item of a list or tuple, which the caller may use while it holds that. */
static PyObject *
cell_of(PyObject *cells, Py_ssize_t at)
{
    return PyList_CheckExact(cells) ? PyList_GetItem(cells, at)
                                    : PyTuple_GetItem(cells, at);
}

static Py_ssize_t
num_cells(PyObject *cells)
{
    if (PyList_CheckExact(cells))
        return PyList_Size(cells);
    if (PyTuple_CheckExact(cells))
        return PyTuple_Size(cells);
    PyErr_Format(PyExc_TypeError, "values must be in a list or tuple");
    return -1;
}

/* The bytes of a C-contiguous array of a dtype and inner shape, with its items, at most as
 * many as a value may have; 0 where it must be looked at. `field` has the type of arrays,
 * the dtype, the inner shape and the name "dtype". */
static int
array_bytes(PyObject *value, PyObject *const *field, Py_ssize_t maximum, Py_buffer *view,
            Py_ssize_t *items)
{
    Py_ssize_t axes = PyTuple_Size(field[2]);
    if ((PyObject *)Py_TYPE(value) != field[0])
        return 0;
    PyObject *own = PyObject_GetAttr(value, field[3]);
    int same = own == field[1];
    if (own != NULL && !same)
        same = PyObject_RichCompareBool(own, field[1], Py_EQ) == 1;
    Py_XDECREF(own);
    if (!same || PyObject_GetBuffer(value, view, PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    int fits = view->ndim == axes + 1 && view->shape[0] <= maximum;
    for (Py_ssize_t i = 0; fits && i < axes; i++)
        fits = view->shape[i + 1] == PyLong_AsSsize_t(PyTuple_GetItem(field[2], i));
    *items = fits ? view->shape[0] : -1;
    if (!fits)
        PyBuffer_Release(view);
    return fits;
}

enum { VALUE_ALIGNMENT = 8 };

/* The bytes of a value that needs no look, with its items; 0 where it needs one. `kind` is
 * that of the field, by its first letter; `field` is as `array_bytes` has it. */
static int
plain_bytes(PyObject *value, PyObject *const *field, long kind, Py_ssize_t maximum,
            Py_buffer *view, Py_ssize_t *items)
{
    if (kind == 't' && PyUnicode_CheckExact(value)) {
        const char *text = PyUnicode_AsUTF8AndSize(value, items);
        if (text != NULL && *items <= maximum &&
            PyBuffer_FillInfo(view, value, (void *)text, *items, 1, PyBUF_SIMPLE) == 0)
            return 1;
        PyErr_Clear();
        return 0;
    }
    if (kind == 'b' && PyBytes_CheckExact(value)) {
        if (PyBytes_Size(value) > maximum || contiguous(value, view, 0) < 0) {
            PyErr_Clear();
            return 0;
        }
        *items = view->len;
        return 1;
    }
    if (kind != 'a' && kind != 'b')
        return 0;
    return array_bytes(value, field, maximum, view, items);
}

enum { CELLS_AHEAD = 8 };

static PyObject *
measure_values(PyObject *module, PyObject *args)
{
    PyObject *cells, *field[4], *arrays[2];
    Py_ssize_t maximum, items;
    Py_buffer lengths, addresses, value;
    int kind;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OOO!niOO:measure_values", &PyTuple_Type, &cells,
                          &field[0], &field[1], &PyTuple_Type, &field[2], &maximum, &kind,
                          &arrays[0], &arrays[1]) ||
        contiguous(arrays[0], &lengths, 1) < 0)
        return NULL;
    if (contiguous(arrays[1], &addresses, 1) < 0) {
        PyBuffer_Release(&lengths);
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(cells), at = 0;
    int fits = lengths.len == 8 * count && addresses.len == 8 * count;
    field[3] = PyUnicode_InternFromString("dtype");
    for (; fits && field[3] != NULL && at < count; at++) {
        PyObject *cell = PyTuple_GetItem(cells, at);
        /* Values that were made one by one lie apart: to fetch them takes most of the time. */
        for (int line = 0; line < 2 && at + CELLS_AHEAD < count; line++)
            __builtin_prefetch((char *)PyTuple_GetItem(cells, at + CELLS_AHEAD) + 64 * line);
        if (cell == NULL || !plain_bytes(cell, field, kind, maximum, &value, &items))
            break;
        ((int64_t *)lengths.buf)[at] = items;
        ((int64_t *)addresses.buf)[at] = (int64_t)(intptr_t)value.buf;
        PyBuffer_Release(&value);
    }
    Py_XDECREF(field[3]);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&addresses);
    if (!fits)
        return PyErr_Format(PyExc_ValueError,
                            "measure_values: lengths and addresses must be int64 [%zd]",
                            count);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(at == count);
}

/* The bytes of a value that was measured. */
static int
cell_bytes(PyObject *cell, Py_buffer *view)
{
    Py_ssize_t nbytes;
    if (!PyUnicode_CheckExact(cell))
        return contiguous(cell, view, 0);
    const char *text = PyUnicode_AsUTF8AndSize(cell, &nbytes);
    return text == NULL
               ? -1
               : PyBuffer_FillInfo(view, cell, (void *)text, nbytes, 1, PyBUF_SIMPLE);
}

static PyObject *
join_values(PyObject *module, PyObject *args)
{
    PyObject *cells, *out;
    Py_buffer to, from;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:join_values", &cells, &out))
        return NULL;
    Py_ssize_t count = num_cells(cells), done = 0, at = 0;
    if (count < 0 || contiguous(out, &to, 1) < 0)
        return NULL;
    for (; at < count; at++) {
        PyObject *cell = cell_of(cells, at);
        if (cell == NULL || cell_bytes(cell, &from) < 0)
            break;
        int fits = from.len <= to.len - done;
        if (fits)
            memcpy((char *)to.buf + done, from.buf, (size_t)from.len);
        done += from.len;
        PyBuffer_Release(&from);
        if (!fits)
            break;
    }
    int whole = done == to.len;
    PyBuffer_Release(&to);
    if (PyErr_Occurred())
        return NULL;
    if (at < count || !whole)
        return PyErr_Format(PyExc_ValueError,
                            "join_values: out must have the bytes of all values");
    return Py_NewRef(Py_None);
}

static PyObject *
store_value(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { VALUE, ARRAY, DTYPE, INNER, MAXIMUM, KIND, HEAD, SIZE, FREE, MAPPING, NEAR, FAR,
           REFERENCE, NUM_ARGS };
    Py_buffer value, mapping, reference;
    Py_ssize_t items;
    (void)module;
    if (nargs != NUM_ARGS)
        return PyErr_Format(PyExc_TypeError, "store_value takes %d arguments, got %zd",
                            NUM_ARGS, nargs);
    Py_ssize_t maximum = PyLong_AsSsize_t(args[MAXIMUM]);
    long kind = PyLong_AsLong(args[KIND]);
    Py_ssize_t head = PyLong_AsSsize_t(args[HEAD]), size = PyLong_AsSsize_t(args[SIZE]);
    Py_ssize_t until = PyLong_AsSsize_t(args[FREE]);
    Py_ssize_t near = PyLong_AsSsize_t(args[NEAR]), far = PyLong_AsSsize_t(args[FAR]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyTuple_Check(args[INNER]) || head < 0 || head > PY_SSIZE_T_MAX / 4 || size < 1 ||
        size > PY_SSIZE_T_MAX / 4)
        return PyErr_Format(PyExc_ValueError, "store_value: the place must be in a heap");
    PyObject *field[] = {args[ARRAY], args[DTYPE], args[INNER],
                         PyUnicode_InternFromString("dtype")};
    if (field[3] == NULL)
        return NULL;
    int plain = plain_bytes(args[VALUE], field, kind, maximum, &value, &items);
    Py_DECREF(field[3]);
    if (!plain)
        return PyLong_FromLong(-1);
    if (contiguous(args[MAPPING], &mapping, 1) < 0) {
        PyBuffer_Release(&value);
        return NULL;
    }
    if (contiguous(args[REFERENCE], &reference, 1) < 0) {
        PyBuffer_Release(&value);
        PyBuffer_Release(&mapping);
        return NULL;
    }
    Py_ssize_t after = -1, nbytes = value.len;
    int fits = reference.len == 16 && far <= mapping.len && far <= size;
    if (fits && nbytes == 0) {
        memset(reference.buf, 0, 16);
        after = head;
    }
    else if (fits && nbytes <= size) {
        /* A value that would cross the ring's end begins behind it. */
        if (head % size > size - nbytes)
            head += size - head % size;
        Py_ssize_t offset = head % size, stop = head + nbytes;
        stop += (VALUE_ALIGNMENT - stop % VALUE_ALIGNMENT) % VALUE_ALIGNMENT;
        if (stop <= until && offset >= near && offset <= far - nbytes) {
            uint32_t length = (uint32_t)items;
            uint32_t crc = ~fold_copy(~(uint32_t)0, value.buf, (size_t)nbytes,
                                      (unsigned char *)mapping.buf + offset);
            int64_t position = head;
            memcpy(reference.buf, &position, 8);
            memcpy((char *)reference.buf + 8, &length, 4);
            memcpy((char *)reference.buf + 12, &crc, 4);
            after = stop;
        }
    }
    PyBuffer_Release(&value);
    PyBuffer_Release(&mapping);
    PyBuffer_Release(&reference);
    if (!fits)
        return PyErr_Format(PyExc_ValueError,
                            "store_value: the place must be in a heap");
    return PyLong_FromSsize_t(after);
}
