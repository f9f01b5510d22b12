/* A publication and its checksum; rows.py says what it does. */

typedef struct {
    PyObject_HEAD
    PyObject *data;
    Py_buffer view;
    Py_ssize_t sequence, columns, num_envs, num_columns, filled;
    /* What the zeros up to the checksum do to each byte of a checksum so far. */
    uint32_t zeros[4][256];
} Slot;

/* Whether publications have the bounds of a heap, too. */
static int
has_heap(const Slot *slot)
{
    return slot->num_columns > 4;
}

static int
slot_fits(Slot *self)
{
    const char *bytes = self->view.buf;
    Py_ssize_t end = self->view.len - 4;
    if (self->num_envs < 1 || self->num_envs > self->view.len / 32 ||
        self->sequence < 0 || self->columns < self->sequence + 8 ||
        (self->num_columns != 4 && self->num_columns != 6))
        return 0;
    self->filled = self->columns + 8 * self->num_columns * self->num_envs;
    if (self->filled > end)
        return 0;
    for (Py_ssize_t at = self->filled; at < end; at++)
        if (bytes[at])
            return 0;
    return 1;
}

static PyObject *
Slot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *template;
    Py_ssize_t sequence, columns, num_envs, num_columns = 4;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "Slot takes no keywords");
    if (!PyArg_ParseTuple(args, "Onnn|n:Slot", &template, &sequence, &columns, &num_envs,
                          &num_columns))
        return NULL;
    Slot *self = (Slot *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->sequence = sequence;
    self->columns = columns;
    self->num_envs = num_envs;
    self->num_columns = num_columns;
    self->data = PyByteArray_FromObject(template);
    if (self->data == NULL || contiguous(self->data, &self->view, 1) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (!slot_fits(self)) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError,
                            "Slot: the record must have %zd environments, and zeros up "
                            "to its checksum",
                            num_envs);
    }
    learn_zeros(self->zeros, self->view.len - 4 - self->filled);
    return (PyObject *)self;
}

static void
Slot_dealloc(Slot *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    if (self->view.obj)
        PyBuffer_Release(&self->view);
    Py_XDECREF(self->data);
    release(self);
    Py_DECREF(type);
}

static int
put_column(Slot *self, Py_ssize_t which, PyObject *array)
{
    Py_buffer view;
    Py_ssize_t nbytes = 8 * self->num_envs;
    if (contiguous(array, &view, 0) < 0)
        return -1;
    if (view.len != nbytes) {
        PyErr_Format(PyExc_ValueError,
                     "Slot: values must be int64 [%zd], got %zd bytes",
                     self->num_envs, view.len);
        PyBuffer_Release(&view);
        return -1;
    }
    memcpy((char *)self->view.buf + self->columns + which * nbytes, view.buf,
           (size_t)nbytes);
    PyBuffer_Release(&view);
    return 0;
}

/* Puts the number and the checksum to columns that are there. */
static void
seal(Slot *self, uint64_t number)
{
    unsigned char *bytes = self->view.buf;
    memcpy(bytes + self->sequence, &number, 8);
    uint32_t crc = fold(0xFFFFFFFFu, bytes, (size_t)self->filled);
    crc = ~over_zeros(self->zeros, crc);
    memcpy(bytes + self->view.len - 4, &crc, 4);
}

static PyObject *
Slot_publish(Slot *self, PyObject *args)
{
    unsigned long long number;
    /* Of the body; the fourth has the cuts, which stay. */
    static const Py_ssize_t columns[5] = {0, 1, 2, 4, 5};
    PyObject *arrays[5] = {NULL, NULL, NULL, Py_None, Py_None};
    if (!PyArg_ParseTuple(args, "KOOO|OO:publish", &number, &arrays[0], &arrays[1],
                          &arrays[2], &arrays[3], &arrays[4]))
        return NULL;
    int count = arrays[3] == Py_None || arrays[4] == Py_None ? 3 : 5;
    if (count == 5 && self->num_columns < 6)
        return PyErr_Format(PyExc_ValueError,
                            "Slot: the record has no columns for a heap");
    for (int which = 0; which < count; which++)
        if (put_column(self, columns[which], arrays[which]) < 0)
            return NULL;
    seal(self, number);
    return Py_NewRef(self->data);
}

static PyObject *
Slot_data(Slot *self, void *closure)
{
    (void)closure;
    Py_INCREF(self->data);
    return self->data;
}

static PyObject *
Slot_has_heap(Slot *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(has_heap(self));
}

static PyMethodDef Slot_methods[] = {
    {"publish", (PyCFunction)(void (*)(void))Slot_publish, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef Slot_attributes[] = {
    {"data", (getter)(void (*)(void))Slot_data, NULL, NULL, NULL},
    {"has_heap", (getter)(void (*)(void))Slot_has_heap, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot Slot_slots[] = {
    {Py_tp_new, (void *)Slot_new},
    {Py_tp_dealloc, (void *)Slot_dealloc},
    {Py_tp_methods, Slot_methods},
    {Py_tp_getset, Slot_attributes},
    {0, NULL},
};
static PyType_Spec Slot_spec = {
    "mmreplay.kernels._rows.Slot", sizeof(Slot), 0, Py_TPFLAGS_DEFAULT, Slot_slots,
};
