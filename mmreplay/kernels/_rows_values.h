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

/* The items of a C-contiguous array of a dtype and inner shape, at most as many as a
 * value may have; -1 where it must be looked at. */
static Py_ssize_t
items_of(PyObject *value, PyObject *array_type, PyObject *dtype, PyObject *inner,
         Py_ssize_t maximum)
{
    Py_buffer view;
    Py_ssize_t items = -1, axes = PyTuple_Size(inner);
    if ((PyObject *)Py_TYPE(value) != array_type)
        return -1;
    PyObject *own = PyObject_GetAttrString(value, "dtype");
    if (own == NULL)
        return -1;
    int same = own == dtype ? 1 : PyObject_RichCompareBool(own, dtype, Py_EQ);
    Py_DECREF(own);
    if (same != 1)
        return -1;
    if (PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return -1;
    }
    if (view.ndim == axes + 1 && view.shape[0] <= maximum)
        items = view.shape[0];
    for (Py_ssize_t i = 0; i < axes && items >= 0; i++)
        if (view.shape[i + 1] != PyLong_AsSsize_t(PyTuple_GetItem(inner, i)))
            items = -1;
    PyBuffer_Release(&view);
    return items;
}

static PyObject *
measure_values(PyObject *module, PyObject *args)
{
    PyObject *cells, *array_type, *dtype, *inner, *lengths;
    Py_ssize_t maximum;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO!nO:measure_values", &cells, &array_type, &dtype,
                          &PyTuple_Type, &inner, &maximum, &lengths))
        return NULL;
    Py_ssize_t count = num_cells(cells), at = 0;
    if (count < 0 || contiguous(lengths, &view, 1) < 0)
        return NULL;
    int fits = view.len == 8 * count;
    for (; fits && at < count; at++) {
        PyObject *cell = cell_of(cells, at);
        Py_ssize_t items =
            cell == NULL ? -1 : items_of(cell, array_type, dtype, inner, maximum);
        if (items < 0)
            break;
        ((int64_t *)view.buf)[at] = items;
    }
    PyBuffer_Release(&view);
    if (!fits)
        return PyErr_Format(PyExc_ValueError,
                            "measure_values: lengths must be int64 [%zd]", count);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(at == count);
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
        if (cell == NULL || contiguous(cell, &from, 0) < 0)
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

enum { VALUE_ALIGNMENT = 8 };

/* The bytes of a value that needs no look, with its items; 0 where it needs one, -1 with
 * an error set. `kind` is that of the field, by its first letter. */
static int
plain_bytes(PyObject *value, PyObject *const *field, long kind, Py_ssize_t maximum,
            Py_buffer *view, Py_ssize_t *items)
{
    if (kind == 't' && PyUnicode_CheckExact(value)) {
        Py_ssize_t nbytes;
        const char *text = PyUnicode_AsUTF8AndSize(value, &nbytes);
        if (text == NULL) {
            PyErr_Clear();
            return 0;
        }
        *items = nbytes;
        return nbytes <= maximum &&
                       PyBuffer_FillInfo(view, value, (void *)text, nbytes, 1,
                                         PyBUF_SIMPLE) == 0
                   ? 1
                   : 0;
    }
    if (kind == 'b' && PyBytes_CheckExact(value)) {
        if (contiguous(value, view, 0) < 0)
            return -1;
        *items = view->len;
    }
    else if (kind == 'a' || kind == 'b') {
        *items = items_of(value, field[0], field[1], field[2], maximum);
        if (*items < 0)
            return PyErr_Occurred() ? -1 : 0;
        if (contiguous(value, view, 0) < 0)
            return -1;
    }
    else
        return 0;
    if (*items <= maximum)
        return 1;
    PyBuffer_Release(view);
    return 0;
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
    int plain = plain_bytes(args[VALUE], &args[ARRAY], kind, maximum, &value, &items);
    if (plain < 0)
        return NULL;
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
            uint32_t crc = ~fold(~(uint32_t)0, value.buf, (size_t)nbytes);
            int64_t position = head;
            memcpy((char *)mapping.buf + offset, value.buf, (size_t)nbytes);
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
