/* Buffers of a call's arrays, held until it returns. */

typedef struct {
    const char *name;
    int count;
    Py_buffer views[MAX_ARRAYS];
} Buffers;

static PyObject *
release(Buffers *buffers, PyObject *result)
{
    while (buffers->count > 0)
        PyBuffer_Release(&buffers->views[--buffers->count]);
    return result;
}

static PyObject *
refuse(Buffers *buffers, const char *message)
{
    PyErr_Format(PyExc_ValueError, "%s: %s", buffers->name, message);
    return release(buffers, NULL);
}

/* The bytes of an array, or NULL with an error set. */
static void *
acquire(Buffers *buffers, PyObject *array, int writable, Py_ssize_t *count, int itemsize)
{
    Py_buffer *view = &buffers->views[buffers->count];
    if (PyObject_GetBuffer(array, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    buffers->count++;
    *count = view->len / itemsize;
    return view->buf;
}
