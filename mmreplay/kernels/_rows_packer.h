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
read_member(RecordPacker *self, Member *member, PyObject *item)
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
    if (member->offset >= 0 && member->offset > self->stride - member->nbytes) {
        PyErr_Format(PyExc_ValueError, "RecordPacker: %R ends outside the record", path);
        return -1;
    }
    if (kind_length && (member->ndim || member->itemsize > 8)) {
        PyErr_Format(PyExc_ValueError, "RecordPacker: %R takes no scalars", path);
        return -1;
    }
    if (member->mark && member->nbytes != 1) {
        PyErr_Format(PyExc_ValueError, "RecordPacker: %R is no bool that ends a step", path);
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

static int
read_key(RecordPacker *self, Key *key, PyObject *item)
{
    PyObject *name;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "Unn", &name, &key->member, &key->count))
        return -1;
    Py_INCREF(name);
    key->name = name;
    PyUnicode_InternInPlace(&key->name);
    /* `find_values` does not check these numbers again. */
    if (key->member >= self->count || key->count < 0) {
        PyErr_Format(PyExc_ValueError, "RecordPacker: %R is no key of a field", name);
        return -1;
    }
    return 0;
}

/* Where the keys of a branch end; -1 where they are not all there. */
static Py_ssize_t
end_of(const RecordPacker *self, Py_ssize_t at)
{
    if (at >= self->num_keys)
        return -1;
    const Key *key = &self->keys[at++];
    if (key->member < 0)
        for (Py_ssize_t i = 0; i < key->count && at >= 0; i++)
            at = end_of(self, at);
    return at;
}

/* Whether every field has one key. */
static int
every_field_has_a_key(const RecordPacker *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_ssize_t num = 0;
        for (Py_ssize_t at = 0; at < self->num_keys; at++)
            num += self->keys[at].member == i;
        if (num != 1)
            return 0;
    }
    return 1;
}

/* A zeroed bytearray, and its buffer. */
static PyObject *
zeroed_bytes(Py_ssize_t nbytes, Py_buffer *view)
{
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, nbytes);
    if (bytes != NULL && contiguous(bytes, view, 1) < 0)
        Py_CLEAR(bytes);
    if (bytes != NULL)
        memset(view->buf, 0, (size_t)nbytes);
    return bytes;
}

static PyObject *
RecordPacker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *members, *keys, *array_type, *double_type;
    Py_ssize_t nbytes, num_envs, max_nbytes;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "RecordPacker takes no keywords");
    if (!PyArg_ParseTuple(args, "O!O!nnnOO:RecordPacker", &PyTuple_Type, &members,
                          &PyTuple_Type, &keys, &nbytes, &num_envs, &max_nbytes,
                          &array_type, &double_type))
        return NULL;
    RecordPacker *self = (RecordPacker *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->num_envs = num_envs;
    self->stride = nbytes;
    Py_INCREF(array_type);
    Py_INCREF(double_type);
    self->array_type = array_type;
    self->double_type = double_type;
    self->dtype_name = PyUnicode_InternFromString("dtype");
    self->together = nbytes && num_envs > 0 &&
                     (num_envs == 1 || max_nbytes / nbytes >= num_envs);
    self->rows = zeroed_bytes(self->together ? num_envs * nbytes : 0, &self->rows_view);
    self->ends = zeroed_bytes(num_envs > 0 ? num_envs : 0, &self->ends_view);
    if (self->rows == NULL || self->ends == NULL)
        goto failed;
    Py_ssize_t count = PyTuple_Size(members), num_keys = PyTuple_Size(keys);
    self->members = PyMem_Calloc((size_t)count + 1, sizeof(Member));
    self->keys = PyMem_Calloc((size_t)num_keys + 1, sizeof(Key));
    self->unpacked = PyMem_Calloc((size_t)count + 1, sizeof(PyObject *));
    if (self->members == NULL || self->keys == NULL || self->unpacked == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    while (self->count < count) {
        Member *member = &self->members[self->count];
        PyObject *item = PyTuple_GetItem(members, self->count++);
        if (read_member(self, member, item) < 0)
            goto failed;
    }
    while (self->num_keys < num_keys) {
        Key *key = &self->keys[self->num_keys];
        PyObject *item = PyTuple_GetItem(keys, self->num_keys++);
        if (read_key(self, key, item) < 0)
            goto failed;
    }
    if (end_of(self, 0) != num_keys || !every_field_has_a_key(self)) {
        PyErr_Format(PyExc_ValueError, "RecordPacker: the keys are no tree of the fields");
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
RecordPacker_dealloc(RecordPacker *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_XDECREF(self->members[i].path);
        Py_XDECREF(self->members[i].dtype);
        Py_XDECREF(self->members[i].scalar);
        PyMem_Free(self->members[i].shape);
        if (self->unpacked)
            Py_XDECREF(self->unpacked[i]);
    }
    for (Py_ssize_t i = 0; i < self->num_keys; i++)
        Py_XDECREF(self->keys[i].name);
    PyMem_Free(self->members);
    PyMem_Free(self->keys);
    PyMem_Free(self->unpacked);
    if (self->rows_view.obj)
        PyBuffer_Release(&self->rows_view);
    if (self->ends_view.obj)
        PyBuffer_Release(&self->ends_view);
    Py_XDECREF(self->rows);
    Py_XDECREF(self->ends);
    Py_XDECREF(self->array_type);
    Py_XDECREF(self->double_type);
    Py_XDECREF(self->dtype_name);
    release(self);
    Py_DECREF(type);
}

/* ---- the walk of a mapping -------------------------------------------------- */

static void
forget(PyObject **values, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        Py_CLEAR(values[i]);
}

/* Finds the values below the branch whose own key is at `at`, and moves that on. Only
 * dicts of exactly these keys are followed: whatever else maps names may say anything
 * at each call. */
static int
find_values(RecordPacker *self, PyObject *branch, Py_ssize_t *at, PyObject **values)
{
    Py_ssize_t left = self->keys[(*at)++].count;
    if (!PyDict_CheckExact(branch) || PyDict_Size(branch) != left)
        return ODD;
    for (; left; left--) {
        const Key *key = &self->keys[*at];
        PyObject *value = PyDict_GetItemWithError(branch, key->name);
        if (value == NULL)
            return PyErr_Occurred() ? FAILED : ODD;
        Py_INCREF(value);
        if (key->member >= 0) {
            values[key->member] = value;
            (*at)++;
            continue;
        }
        int status = find_values(self, value, at, values);
        Py_DECREF(value);
        if (status != ACCEPTED)
            return status;
    }
    return ACCEPTED;
}

/* The same where the keys are whole paths. */
static int
find_flat(RecordPacker *self, PyObject *data, PyObject **values)
{
    if (!PyDict_CheckExact(data) || PyDict_Size(data) != self->count)
        return ODD;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        PyObject *value = PyDict_GetItemWithError(data, self->members[i].path);
        if (value == NULL)
            return PyErr_Occurred() ? FAILED : ODD;
        Py_INCREF(value);
        values[i] = value;
    }
    return ACCEPTED;
}

enum { FEW = 32 };

/* Values of all fields, in memory for a few of them or in new memory; NULL where there
 * is no memory, or one is not found: `status` says which. */
static PyObject **
values_of(RecordPacker *self, PyObject *data, PyObject **few, int *status)
{
    PyObject **values = few;
    Py_ssize_t at = 0;
    if (self->count > FEW) {
        values = PyMem_Malloc((size_t)self->count * sizeof(PyObject *));
        if (values == NULL) {
            PyErr_NoMemory();
            *status = FAILED;
            return NULL;
        }
    }
    memset(values, 0, (size_t)self->count * sizeof(PyObject *));
    *status = self->count ? find_values(self, data, &at, values) : ODD;
    if (*status == ODD && self->num_keys > self->count + 1) {
        forget(values, self->count);
        *status = find_flat(self, data, values);
    }
    if (*status == ACCEPTED)
        return values;
    forget(values, self->count);
    if (values != few)
        PyMem_Free(values);
    return NULL;
}

/* The steps that an array [T, E, *shape], or [T, *shape] of an only environment, has;
 * 0 where it must be looked at. */
static Py_ssize_t
steps_of(RecordPacker *self, const Member *member, PyObject *value)
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
RecordPacker_block(RecordPacker *self, PyObject *data)
{
    PyObject *few[FEW], *columns = NULL;
    int status;
    PyObject **values = values_of(self, data, few, &status);
    if (values == NULL && status == FAILED)
        return NULL;
    if (values == NULL)
        Py_RETURN_NONE;
    Py_ssize_t steps = steps_of(self, &self->members[0], values[0]);
    for (Py_ssize_t i = 1; i < self->count && steps > 0; i++)
        if (steps_of(self, &self->members[i], values[i]) != steps)
            steps = 0;
    if (steps > 0 && !PyErr_Occurred())
        columns = PyDict_New();
    for (Py_ssize_t i = 0; i < self->count && columns; i++)
        if (PyDict_SetItem(columns, self->members[i].path, values[i]) < 0)
            Py_CLEAR(columns);
    forget(values, self->count);
    if (values != few)
        PyMem_Free(values);
    if (columns == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return columns;
}

#include "_rows_wide.h"

/* Checks and packs a step: the ends that it says of some environment, ODD_STEP, or
 * FAILED_STEP with an error set. */
enum { ODD_STEP = -1, FAILED_STEP = -2 };

static long
prepare(RecordPacker *self, PyObject *data)
{
    PyObject *few[FEW];
    long marks = 0;
    int status;
    PyObject **values = values_of(self, data, few, &status);
    if (values == NULL)
        return status == FAILED ? FAILED_STEP : ODD_STEP;
    unsigned char *ends = self->ends_view.buf;
    if (self->num_envs > 1)
        memset(ends, 0, (size_t)self->num_envs);
    for (Py_ssize_t i = 0; i < self->count && status == ACCEPTED; i++) {
        const Member *member = &self->members[i];
        status = self->num_envs == 1 ? take(self, member, values[i], &marks)
                                     : take_each(self, member, values[i], &marks);
        if (PyErr_Occurred())
            status = FAILED;
    }
    if (self->num_envs == 1)
        ends[0] = (unsigned char)marks;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Member *member = &self->members[i];
        PyObject *former = values[i];
        if (status == ACCEPTED && !member->mark && member->nbytes &&
            (member->offset < 0 || !self->together)) {
            former = self->unpacked[i];
            self->unpacked[i] = values[i];
        }
        Py_XDECREF(former);
    }
    if (values != few)
        PyMem_Free(values);
    return status == ACCEPTED ? marks : status == FAILED ? FAILED_STEP : ODD_STEP;
}

static PyObject *
RecordPacker_prepare(RecordPacker *self, PyObject *data)
{
    long marks = prepare(self, data);
    return marks == FAILED_STEP ? NULL : PyLong_FromLong(marks);
}

static PyObject *
RecordPacker_unpacked(RecordPacker *self, PyObject *unused)
{
    (void)unused;
    PyObject *columns = PyDict_New();
    if (columns == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        PyObject *value = self->unpacked[i];
        if (value == NULL)
            continue;
        self->unpacked[i] = NULL;
        int status = PyDict_SetItem(columns, self->members[i].path, value);
        Py_DECREF(value);
        if (status < 0) {
            Py_DECREF(columns);
            return NULL;
        }
    }
    return columns;
}

/* Buffers of the fields in the record; returns the number of members before the first
 * one that failed. */
static Py_ssize_t
acquire_columns(RecordPacker *self, PyObject *columns, Py_buffer *views, Py_ssize_t stop)
{
    Py_ssize_t i = 0;
    for (; i < self->count; i++) {
        const Member *member = &self->members[i];
        if (member->offset < 0)
            continue;
        PyObject *value = PyObject_GetItem(columns, member->path);
        if (value == NULL)
            return i;
        int status = bytes_of(value, &views[i]);
        Py_DECREF(value);
        if (status < 0)
            return i;
        if (views[i].len / member->nbytes < stop) {
            PyErr_Format(PyExc_ValueError,
                         "pack: %R must have %zd rows of %zd bytes, got %zd bytes",
                         member->path, stop, member->nbytes, views[i].len);
            PyBuffer_Release(&views[i]);
            return i;
        }
    }
    return i;
}

enum { LENGTHY = 1 << 20 };

typedef void (*PackRows)(RecordPacker *, const Py_buffer *, char *, Py_ssize_t, Py_ssize_t);

/* Packs rows [first, stop) of columns; fails where a column has too few. */
static int
pack_columns(RecordPacker *self, PyObject *columns, char *out, Py_ssize_t first,
             Py_ssize_t stop, PackRows way)
{
    Py_buffer *views = PyMem_Calloc((size_t)self->count + 1, sizeof(Py_buffer));
    if (views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t acquired = acquire_columns(self, columns, views, stop);
    int done = acquired == self->count ? 0 : -1;
    if (done == 0) {
        /* Other threads may run during long copies only: to let them takes time, too. */
        int lengthy = stop - first >= LENGTHY / self->stride;
        PyThreadState *state = lengthy ? PyEval_SaveThread() : NULL;
        way(self, views, out, first, stop);
        if (state)
            PyEval_RestoreThread(state);
    }
    while (acquired--)
        if (views[acquired].obj)
            PyBuffer_Release(&views[acquired]);
    PyMem_Free(views);
    return done;
}

static PyObject *
pack_with(RecordPacker *self, PyObject *args, PackRows way)
{
    PyObject *columns, *target;
    Py_ssize_t first, stop;
    Py_buffer out;
    int done = -1;
    if (!PyArg_ParseTuple(args, "OOnn:pack", &target, &columns, &first, &stop) ||
        contiguous(target, &out, 1) < 0)
        return NULL;
    if (self->stride < 1 || first < 0 || first > stop ||
        out.len / self->stride < stop - first)
        PyErr_Format(PyExc_ValueError,
                     "pack: out must hold rows %zd to %zd of %zd bytes, got %zd bytes",
                     first, stop, self->stride, out.len);
    else
        done = pack_columns(self, columns, out.buf, first, stop, way);
    PyBuffer_Release(&out);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
RecordPacker_pack(RecordPacker *self, PyObject *args)
{
    return pack_with(self, args, pack_rows);
}

static PyObject *
RecordPacker_stream(RecordPacker *self, PyObject *args)
{
    return pack_with(self, args, stream_rows);
}

static PyObject *
RecordPacker_rows(RecordPacker *self, void *closure)
{
    (void)closure;
    return Py_NewRef(self->rows);
}

static PyObject *
RecordPacker_ends(RecordPacker *self, void *closure)
{
    (void)closure;
    return Py_NewRef(self->ends);
}

static PyMethodDef RecordPacker_methods[] = {
    {"prepare", (PyCFunction)(void (*)(void))RecordPacker_prepare, METH_O, NULL},
    {"unpacked", (PyCFunction)(void (*)(void))RecordPacker_unpacked, METH_NOARGS, NULL},
    {"block", (PyCFunction)(void (*)(void))RecordPacker_block, METH_O, NULL},
    {"pack", (PyCFunction)(void (*)(void))RecordPacker_pack, METH_VARARGS, NULL},
    {"stream", (PyCFunction)(void (*)(void))RecordPacker_stream, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef RecordPacker_attributes[] = {
    {"rows", (getter)(void (*)(void))RecordPacker_rows, NULL, NULL, NULL},
    {"ends", (getter)(void (*)(void))RecordPacker_ends, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot RecordPacker_slots[] = {
    {Py_tp_new, (void *)RecordPacker_new},
    {Py_tp_dealloc, (void *)RecordPacker_dealloc},
    {Py_tp_methods, RecordPacker_methods},
    {Py_tp_getset, RecordPacker_attributes},
    {0, NULL},
};
static PyType_Spec RecordPacker_spec = {
    "mmreplay.kernels._rows.RecordPacker", sizeof(RecordPacker), 0, Py_TPFLAGS_DEFAULT,
    RecordPacker_slots,
};
