/* Arrays that a function is given, held while it runs. */

typedef struct {
    const char *name;
    int count;
    Py_buffer views[MAX_ARRAYS];
} Held;

static PyObject *
release(Held *held, PyObject *result)
{
    while (held->count > 0)
        PyBuffer_Release(&held->views[--held->count]);
    return result;
}

static PyObject *
refuse(Held *held, const char *message)
{
    PyErr_Format(PyExc_ValueError, "%s: %s", held->name, message);
    return release(held, NULL);
}

/* The bytes of an array, or NULL with an error set. */
static void *
hold(Held *held, PyObject *array, int writable, Py_ssize_t *count, int itemsize)
{
    Py_buffer *view = &held->views[held->count];
    if (PyObject_GetBuffer(array, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    held->count++;
    *count = view->len / itemsize;
    return view->buf;
}
