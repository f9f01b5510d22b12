/* Records of small fields, packed from plain steps and blocks; see rows.py. */

#include "_rows_take.h"
#include "_rows_pack.h"

static int
read_shape(Member *member, PyObject *shape)
{
    member->ndim = PyTuple_Size(shape);
    if (member->ndim < 0)
        return -1;
    member->shape = PyMem_Calloc((size_t)member->ndim + 1, sizeof(Py_ssize_t));
    if (member->shape == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    member->nbytes = member->itemsize;
    for (Py_ssize_t i = 0; i < member->ndim; i++) {
        member->shape[i] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
        if (member->shape[i] < 0)
            return -1;
        member->nbytes *= member->shape[i];
    }
    return 0;
}

static int
read_member(Packer *self, Member *member, PyObject *item)
{
    PyObject *path, *dtype, *scalar, *shape;
    const char *kind;
    Py_ssize_t kind_length;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "UOOs#nO!nl", &path, &dtype, &scalar, &kind,
                          &kind_length, &member->itemsize, &PyTuple_Type, &shape,
                          &member->offset, &member->mark))
        return -1;
    if (read_shape(member, shape) < 0)
        return -1;
    if (member->offset >= 0 && member->offset > self->view.len - member->nbytes) {
        PyErr_Format(PyExc_ValueError, "Packer: %R ends outside the record", path);
        return -1;
    }
    if (kind_length && (member->ndim || member->itemsize > 8)) {
        PyErr_Format(PyExc_ValueError, "Packer: %R takes no scalars", path);
        return -1;
    }
    if (code_of(dtype, &member->code) < 0)
        return -1;
    member->kind = kind_length ? *kind : 0;
    Py_INCREF(path);
    Py_INCREF(dtype);
    Py_INCREF(scalar);
    member->path = path;
    member->dtype = dtype;
    member->scalar = scalar;
    PyUnicode_InternInPlace(&member->path);
    return 0;
}

static PyObject *
Packer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *members, *array_type, *double_type;
    Py_ssize_t nbytes, num_envs, most;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "Packer takes no keywords");
    if (!PyArg_ParseTuple(args, "O!nnnOO:Packer", &PyTuple_Type, &members, &nbytes,
                          &num_envs, &most, &array_type, &double_type))
        return NULL;
    Packer *self = (Packer *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->num_envs = num_envs;
    Py_INCREF(array_type);
    Py_INCREF(double_type);
    self->array_type = array_type;
    self->double_type = double_type;
    self->dtype_name = PyUnicode_InternFromString("dtype");
    self->record = PyByteArray_FromStringAndSize(NULL, nbytes);
    if (self->record == NULL || contiguous(self->record, &self->view, 1) < 0)
        goto failed;
    memset(self->view.buf, 0, (size_t)nbytes);
    self->together = nbytes && num_envs > 0 && most / nbytes >= num_envs;
    most = self->together ? num_envs * nbytes : 0;
    self->rows = PyByteArray_FromStringAndSize(NULL, most);
    if (self->rows == NULL || contiguous(self->rows, &self->rows_view, 1) < 0)
        goto failed;
    memset(self->rows_view.buf, 0, (size_t)most);
    Py_ssize_t count = PyTuple_Size(members);
    self->members = PyMem_Calloc((size_t)count + 1, sizeof(Member));
    if (self->members == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (; self->count < count; self->count++)
        if (read_member(self, &self->members[self->count],
                        PyTuple_GetItem(members, self->count)) < 0) {
            self->count++;
            goto failed;
        }
    self->gaps = nbytes;
    for (Py_ssize_t i = 0; i < count; i++)
        if (self->members[i].offset >= 0)
            self->gaps -= self->members[i].nbytes;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void
Packer_dealloc(Packer *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_XDECREF(self->members[i].path);
        Py_XDECREF(self->members[i].dtype);
        Py_XDECREF(self->members[i].scalar);
        PyMem_Free(self->members[i].shape);
    }
    PyMem_Free(self->members);
    if (self->view.obj)
        PyBuffer_Release(&self->view);
    if (self->rows_view.obj)
        PyBuffer_Release(&self->rows_view);
    Py_XDECREF(self->record);
    Py_XDECREF(self->rows);
    Py_XDECREF(self->array_type);
    Py_XDECREF(self->double_type);
    Py_XDECREF(self->dtype_name);
    release(self);
    Py_DECREF(type);
}

/* The value of a field in a mapping of exactly the fields, borrowed; NULL without an
 * error where it is none. */
static PyObject *
value_of(Packer *self, PyObject *given, const Member *member)
{
    if (!PyDict_CheckExact(given) || PyDict_Size(given) != self->count)
        return NULL;
    return PyDict_GetItemWithError(given, member->path);
}

/* Takes one value of a field, and the bits of what it says: TAKEN, ODD for what is left
 * to Python, or FAILED. */
typedef int (*Take)(Packer *, const Member *, PyObject *, long *);

/* All fields of a step, -1 where one is odd. */
static PyObject *
take_all(Packer *self, PyObject *given, Take one)
{
    long marks = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Member *member = &self->members[i];
        PyObject *value = value_of(self, given, member);
        int told = ODD;
        if (value != NULL) {
            Py_INCREF(value);
            told = one(self, member, value, &marks);
            Py_DECREF(value);
        }
        if (PyErr_Occurred())
            return NULL;
        if (told != TAKEN)
            return PyLong_FromLong(-1);
    }
    return PyLong_FromLong(self->count ? marks : -1);
}

static PyObject *
Packer_step(Packer *self, PyObject *given)
{
    if (self->num_envs != 1)
        return PyLong_FromLong(-1);
    return take_all(self, given, take);
}

/* The steps that an array [T, E, *shape], or [T, *shape] of an only environment, has;
 * 0 where it must be looked at. */
static Py_ssize_t
steps_of(Packer *self, const Member *member, PyObject *value)
{
    Py_buffer view;
    Py_ssize_t steps = 0;
    if ((PyObject *)Py_TYPE(value) != self->array_type ||
        same_dtype(self, member, value) != 1)
        return 0;
    if (PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    Py_ssize_t lead = view.ndim - member->ndim;
    if ((lead == 1 && self->num_envs == 1) ||
        (lead == 2 && view.shape[1] == self->num_envs))
        steps = view.shape[0];
    for (Py_ssize_t i = 0; i < member->ndim; i++)
        if (steps && view.shape[lead + i] != member->shape[i])
            steps = 0;
    PyBuffer_Release(&view);
    return steps;
}

static PyObject *
Packer_block(Packer *self, PyObject *given)
{
    Py_ssize_t steps = -1;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Member *member = &self->members[i];
        PyObject *value = value_of(self, given, member);
        Py_ssize_t told = 0;
        if (value != NULL) {
            Py_INCREF(value);
            told = steps_of(self, member, value);
            Py_DECREF(value);
        }
        if (PyErr_Occurred())
            return NULL;
        if (told < 1 || (i && told != steps))
            return PyLong_FromLong(-1);
        steps = told;
    }
    return PyLong_FromSsize_t(steps);
}

/* The bytes of an array, of a copy where it is not contiguous. */
static int
bytes_of(PyObject *array, Py_buffer *view)
{
    if (contiguous(array, view, 0) == 0)
        return 0;
    PyErr_Clear();
    PyObject *copied = PyObject_CallMethod(array, "copy", NULL);
    if (copied == NULL)
        return -1;
    int told = contiguous(copied, view, 0);
    Py_DECREF(copied);
    return told;
}

#include "_rows_wide.h"

/* Buffers of the fields in the record; how many of the first are held. */
static Py_ssize_t
hold(Packer *self, PyObject *given, Py_buffer *views, Py_ssize_t stop)
{
    Py_ssize_t i = 0;
    for (; i < self->count; i++) {
        const Member *member = &self->members[i];
        if (member->offset < 0)
            continue;
        PyObject *value = PyObject_GetItem(given, member->path);
        if (value == NULL)
            return i;
        int told = bytes_of(value, &views[i]);
        Py_DECREF(value);
        if (told < 0)
            return i;
        if (views[i].len / member->nbytes < stop) {
            PyErr_Format(PyExc_ValueError,
                         "pack: got %zd bytes for %zd rows of %zd bytes in %R, "
                         "expected whole rows",
                         views[i].len, stop, member->nbytes, member->path);
            PyBuffer_Release(&views[i]);
            return i;
        }
    }
    return i;
}

enum { LENGTHY = 1 << 20 };

typedef void (*PackRows)(Packer *, const Py_buffer *, char *, Py_ssize_t, Py_ssize_t);

static PyObject *
pack_with(Packer *self, PyObject *args, PackRows way)
{
    PyObject *given, *target, *result = NULL;
    Py_ssize_t first, stop, held;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "OOnn:pack", &target, &given, &first, &stop))
        return NULL;
    Py_buffer *views = PyMem_Calloc((size_t)self->count + 1, sizeof(Py_buffer));
    if (views == NULL)
        return PyErr_NoMemory();
    if (contiguous(target, &out, 1) < 0) {
        PyMem_Free(views);
        return NULL;
    }
    if (self->view.len < 1 || first < 0 || first > stop ||
        out.len / self->view.len < stop - first)
        PyErr_Format(PyExc_ValueError,
                     "pack: got %zd bytes for rows %zd to %zd of %zd bytes, expected "
                     "room for each",
                     out.len, first, stop, self->view.len);
    else {
        held = hold(self, given, views, stop);
        if (held == self->count) {
            /* Long ones let others go on meanwhile; to ask for that takes time, too. */
            int lengthy = stop - first >= LENGTHY / self->view.len;
            PyThreadState *state = lengthy ? PyEval_SaveThread() : NULL;
            way(self, views, out.buf, first, stop);
            if (state)
                PyEval_RestoreThread(state);
            result = Py_None;
            Py_INCREF(result);
        }
        while (held--)
            if (views[held].obj)
                PyBuffer_Release(&views[held]);
    }
    PyBuffer_Release(&out);
    PyMem_Free(views);
    return result;
}

static PyObject *
Packer_pack(Packer *self, PyObject *args)
{
    return pack_with(self, args, pack_rows);
}

static PyObject *
Packer_stream(Packer *self, PyObject *args)
{
    return pack_with(self, args, stream_rows);
}

static PyObject *
Packer_record(Packer *self, void *closure)
{
    (void)closure;
    Py_INCREF(self->record);
    return self->record;
}

static PyObject *
Packer_rows(Packer *self, void *closure)
{
    (void)closure;
    Py_INCREF(self->rows);
    return self->rows;
}

static PyMethodDef Packer_methods[] = {
    {"step", (PyCFunction)(void (*)(void))Packer_step, METH_O, NULL},
    {"block", (PyCFunction)(void (*)(void))Packer_block, METH_O, NULL},
    {"wide", (PyCFunction)(void (*)(void))Packer_wide, METH_O, NULL},
    {"pack", (PyCFunction)(void (*)(void))Packer_pack, METH_VARARGS, NULL},
    {"stream", (PyCFunction)(void (*)(void))Packer_stream, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef Packer_attributes[] = {
    {"record", (getter)(void (*)(void))Packer_record, NULL, NULL, NULL},
    {"rows", (getter)(void (*)(void))Packer_rows, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot Packer_slots[] = {
    {Py_tp_new, (void *)Packer_new},
    {Py_tp_dealloc, (void *)Packer_dealloc},
    {Py_tp_methods, Packer_methods},
    {Py_tp_getset, Packer_attributes},
    {0, NULL},
};
static PyType_Spec Packer_spec = {
    "mmreplay.kernels._rows.Packer", sizeof(Packer), 0, Py_TPFLAGS_DEFAULT,
    Packer_slots,
};
