/* Rows of bytes: packed, marked and published. rows.py is the twin of
 * each, and says what it does; both give the same bytes and refuse the same things.
 * Bytes are little-endian, as on disk: elsewhere the twins serve. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the twins in rows.py serve where bytes are big-endian"
#endif

enum { START = 1, TERMINATED = 2, TRUNCATED = 4, FINAL = 8 };
enum { END = TERMINATED | TRUNCATED };

/* Copies as few and as wide words as cover the bytes: two may overlap. */
static inline void
copy(char *to, const char *from, size_t nbytes)
{
    if (nbytes >= 16) {
        size_t done = 0;
        for (; done + 16 <= nbytes; done += 16)
            memcpy(to + done, from + done, 16);
        memcpy(to + nbytes - 16, from + nbytes - 16, 16);
    }
    else if (nbytes >= 8) {
        uint64_t first, last;
        memcpy(&first, from, 8);
        memcpy(&last, from + nbytes - 8, 8);
        memcpy(to, &first, 8);
        memcpy(to + nbytes - 8, &last, 8);
    }
    else if (nbytes == 4)
        memcpy(to, from, 4);
    else
        for (size_t at = 0; at < nbytes; at++)
            to[at] = from[at];
}

static int
contiguous(PyObject *value, Py_buffer *view, int writable)
{
    return PyObject_GetBuffer(value, view,
                              PyBUF_SIMPLE | (writable ? PyBUF_WRITABLE : 0));
}

/* ---- mark ------------------------------------------------------------------ */

typedef struct {
    Py_buffer view;
    const char *at;
    Py_ssize_t rows, items;
} Ends;

/* Bools [T, N] of any strides, or None. */
static int
read_ends(PyObject *value, Ends *ends, Py_ssize_t steps, Py_ssize_t envs)
{
    static const char none = 0;
    if (value == Py_None) {
        *ends = (Ends){.at = &none};
        return 0;
    }
    if (PyObject_GetBuffer(value, &ends->view, PyBUF_STRIDED) < 0)
        return -1;
    if (ends->view.ndim != 2 || ends->view.itemsize != 1 ||
        ends->view.shape[0] != steps || ends->view.shape[1] != envs) {
        PyBuffer_Release(&ends->view);
        PyErr_Format(PyExc_ValueError, "mark: expected bools [%zd, %zd]", steps, envs);
        return -1;
    }
    ends->at = ends->view.buf;
    ends->rows = ends->view.strides[0];
    ends->items = ends->view.strides[1];
    return 0;
}

static void
mark_rows(unsigned char *out, const unsigned char *before, const Ends *terminated,
          const Ends *truncated, int final_follows, Py_ssize_t steps, Py_ssize_t envs)
{
    for (Py_ssize_t env = 0; env < envs; env++) {
        unsigned last = before[env];
        const char *first = terminated->at + env * terminated->items;
        const char *second = truncated->at + env * truncated->items;
        for (Py_ssize_t step = 0; step < steps; step++) {
            unsigned flags = (*first ? TERMINATED : 0) | (*second ? TRUNCATED : 0);
            if (last & (final_follows ? FINAL : FINAL | END))
                flags |= START;
            /* What the reset call returned beside the final row is no step. */
            if (final_follows && (last & END))
                flags = FINAL;
            out[step * envs + env] = (unsigned char)flags;
            last = flags;
            first += terminated->rows;
            second += truncated->rows;
        }
    }
}

static PyObject *
mark_views(Py_buffer *out, Py_buffer *before, PyObject *terminated,
           PyObject *truncated, int final_follows)
{
    Ends first, second;
    Py_ssize_t envs = before->len, steps = envs ? out->len / envs : 0;
    if (envs < 1 || steps * envs != out->len)
        return PyErr_Format(PyExc_ValueError,
                            "mark: got room for %zd rows of %zd environments, expected "
                            "whole steps",
                            out->len, envs);
    if (read_ends(terminated, &first, steps, envs) < 0)
        return NULL;
    if (read_ends(truncated, &second, steps, envs) < 0) {
        if (terminated != Py_None)
            PyBuffer_Release(&first.view);
        return NULL;
    }
    mark_rows(out->buf, before->buf, &first, &second, final_follows, steps, envs);
    if (terminated != Py_None)
        PyBuffer_Release(&first.view);
    if (truncated != Py_None)
        PyBuffer_Release(&second.view);
    Py_RETURN_NONE;
}

static PyObject *
mark(PyObject *module, PyObject *args)
{
    PyObject *target, *earlier, *terminated, *truncated, *result = NULL;
    Py_buffer out, before;
    int final_follows;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOp:mark", &target, &earlier, &terminated,
                          &truncated, &final_follows))
        return NULL;
    if (contiguous(target, &out, 1) < 0)
        return NULL;
    if (contiguous(earlier, &before, 0) == 0) {
        result = mark_views(&out, &before, terminated, truncated, final_follows);
        PyBuffer_Release(&before);
    }
    PyBuffer_Release(&out);
    return result;
}

/* ---- crc32c ---------------------------------------------------------------- */

static uint32_t table[8][256];

static void
fill_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
        table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t byte = 0; byte < 256; byte++)
            table[k][byte] =
                (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 255];
}

#if defined(__GNUC__) && defined(__x86_64__)
#define HARDWARE 1

__attribute__((target("sse4.2"))) static uint32_t
fold_hardware(uint32_t crc, const unsigned char *data, size_t nbytes)
{
    uint64_t wide = crc, word;
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        memcpy(&word, data, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    crc = (uint32_t)wide;
    for (; nbytes; nbytes--, data++)
        crc = __builtin_ia32_crc32qi(crc, *data);
    return crc;
}
#endif

/* Takes bytes into a CRC32C without its first and last inversion. */
static uint32_t
fold(uint32_t crc, const unsigned char *data, size_t nbytes)
{
#ifdef HARDWARE
    if (__builtin_cpu_supports("sse4.2"))
        return fold_hardware(crc, data, nbytes);
#endif
    for (; nbytes >= 8; nbytes -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++)
            crc ^= table[7 - k][(word >> (8 * k)) & 255];
    }
    for (; nbytes; nbytes--, data++)
        crc = (crc >> 8) ^ table[0][(crc ^ *data) & 255];
    return crc;
}

/* ---- Slot ------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *data;
    Py_buffer view;
    Py_ssize_t sequence, columns, num_envs, filled;
    /* What the zeros up to the checksum do to each byte of a checksum so far. */
    uint32_t zeros[4][256];
} Slot;

static void
learn_zeros(Slot *self, Py_ssize_t count)
{
    uint32_t bits[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = 1u << bit;
        for (Py_ssize_t i = 0; i < count; i++)
            crc = (crc >> 8) ^ table[0][crc & 255];
        bits[bit] = crc;
    }
    for (int k = 0; k < 4; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = 0;
            for (int bit = 0; bit < 8; bit++)
                if (byte >> bit & 1)
                    crc ^= bits[8 * k + bit];
            self->zeros[k][byte] = crc;
        }
}

static int
slot_fits(Slot *self)
{
    const char *bytes = self->view.buf;
    Py_ssize_t end = self->view.len - 4;
    if (self->num_envs < 1 || self->num_envs > self->view.len / 32 ||
        self->sequence < 0 || self->columns < self->sequence + 8)
        return 0;
    self->filled = self->columns + 32 * self->num_envs;
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
    Py_ssize_t sequence, columns, num_envs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "Slot takes no keywords");
    if (!PyArg_ParseTuple(args, "Onnn:Slot", &template, &sequence, &columns, &num_envs))
        return NULL;
    Slot *self = (Slot *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->sequence = sequence;
    self->columns = columns;
    self->num_envs = num_envs;
    self->data = PyByteArray_FromObject(template);
    if (self->data == NULL || contiguous(self->data, &self->view, 1) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (!slot_fits(self)) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError,
                            "Slot: expected a record of %zd environments with zeros up "
                            "to its checksum",
                            num_envs);
    }
    learn_zeros(self, self->view.len - 4 - self->filled);
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
        PyErr_Format(PyExc_ValueError, "Slot: got %zd bytes, expected int64 [%zd]",
                     view.len, self->num_envs);
        PyBuffer_Release(&view);
        return -1;
    }
    memcpy((char *)self->view.buf + self->columns + which * nbytes, view.buf,
           (size_t)nbytes);
    PyBuffer_Release(&view);
    return 0;
}

static PyObject *
Slot_publish(Slot *self, PyObject *args)
{
    unsigned long long number;
    PyObject *arrays[3];
    if (!PyArg_ParseTuple(args, "KOOO:publish", &number, &arrays[0], &arrays[1],
                          &arrays[2]))
        return NULL;
    for (int which = 0; which < 3; which++)
        if (put_column(self, which, arrays[which]) < 0)
            return NULL;
    unsigned char *bytes = self->view.buf;
    uint64_t sequence = number;
    memcpy(bytes + self->sequence, &sequence, 8);
    uint32_t crc = fold(0xFFFFFFFFu, bytes, (size_t)self->filled);
    crc = self->zeros[0][crc & 255] ^ self->zeros[1][crc >> 8 & 255] ^
          self->zeros[2][crc >> 16 & 255] ^ self->zeros[3][crc >> 24];
    crc = ~crc;
    memcpy(bytes + self->view.len - 4, &crc, 4);
    Py_INCREF(self->data);
    return self->data;
}

static PyObject *
Slot_data(Slot *self, void *closure)
{
    (void)closure;
    Py_INCREF(self->data);
    return self->data;
}

static PyMethodDef Slot_methods[] = {
    {"publish", (PyCFunction)(void (*)(void))Slot_publish, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef Slot_attributes[] = {
    {"data", (getter)(void (*)(void))Slot_data, NULL, NULL, NULL},
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

/* ---- Packer ---------------------------------------------------------------- */

typedef struct {
    PyObject *path, *dtype, *scalar;
    Py_ssize_t *shape;
    Py_ssize_t ndim, itemsize, nbytes, offset;
    long mark;
    char kind;
} Member;

typedef struct {
    PyObject_HEAD
    Member *members;
    Py_ssize_t count, num_envs;
    PyObject *record, *array_type, *double_type, *dtype_name;
    Py_buffer view;
} Packer;

enum { TAKEN = 0, ODD = 1, FAILED = -1 };

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
    Py_ssize_t nbytes, num_envs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "Packer takes no keywords");
    if (!PyArg_ParseTuple(args, "O!nnOO:Packer", &PyTuple_Type, &members, &nbytes,
                          &num_envs, &array_type, &double_type))
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
    Py_XDECREF(self->record);
    Py_XDECREF(self->array_type);
    Py_XDECREF(self->double_type);
    Py_XDECREF(self->dtype_name);
    release(self);
    Py_DECREF(type);
}

/* Puts a value's bytes in their place: into the record, or among the marks. */
static int
put(Packer *self, const Member *member, const void *bytes, long *marks)
{
    if (member->offset >= 0)
        copy((char *)self->view.buf + member->offset, bytes, (size_t)member->nbytes);
    if (member->mark && *(const char *)bytes)
        *marks |= member->mark;
    return TAKEN;
}

static int
same_shape(const Member *member, const Py_buffer *view)
{
    Py_ssize_t lead = view->ndim - member->ndim;
    if (view->len != member->nbytes || lead < 0 || lead > 1 ||
        (lead == 1 && view->shape[0] != 1))
        return 0;
    for (Py_ssize_t i = 0; i < member->ndim; i++)
        if (view->shape[lead + i] != member->shape[i])
            return 0;
    return 1;
}

static int
same_dtype(Packer *self, const Member *member, PyObject *value)
{
    PyObject *dtype = PyObject_GetAttr(value, self->dtype_name);
    if (dtype == NULL)
        return FAILED;
    int same = dtype == member->dtype ||
               PyObject_RichCompareBool(dtype, member->dtype, Py_EQ);
    Py_DECREF(dtype);
    return same;
}

static int
take_array(Packer *self, const Member *member, PyObject *value, long *marks)
{
    Py_buffer view;
    int same = same_dtype(self, member, value);
    if (same != 1)
        return same < 0 ? FAILED : ODD;
    if (PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return ODD;
    }
    int told = same_shape(member, &view) ? put(self, member, view.buf, marks) : ODD;
    PyBuffer_Release(&view);
    return told;
}

static int
take_own(Packer *self, const Member *member, PyObject *value, long *marks)
{
    Py_buffer view;
    if (contiguous(value, &view, 0) < 0) {
        PyErr_Clear();
        return ODD;
    }
    int told = view.len == member->nbytes ? put(self, member, view.buf, marks) : ODD;
    PyBuffer_Release(&view);
    return told;
}

static int
take_float(Packer *self, const Member *member, PyObject *value, long *marks)
{
    double wide = PyFloat_AsDouble(value);
    if (member->itemsize == 8)
        return wide >= -DBL_MAX && wide <= DBL_MAX ? put(self, member, &wide, marks)
                                                   : ODD;
    if (!(wide >= -FLT_MAX && wide <= FLT_MAX))
        return ODD;
    float narrow = (float)wide;
    return put(self, member, &narrow, marks);
}

static int
take_int(Packer *self, const Member *member, PyObject *value, long *marks)
{
    int overflow, bits = (int)(8 * member->itemsize);
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) {
        if (overflow < 0 || member->kind == 'i' || bits < 64)
            return ODD;
        uint64_t large = PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return ODD;
        }
        return put(self, member, &large, marks);
    }
    int64_t least = 0, most = INT64_MAX;
    if (member->kind == 'i') {
        most >>= 64 - bits;
        least = -most - 1;
    }
    else if (bits < 64)
        most = ((int64_t)1 << bits) - 1;
    if (number < least || number > most)
        return ODD;
    return put(self, member, &number, marks);
}

static int
take(Packer *self, const Member *member, PyObject *value, long *marks)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type == self->array_type)
        return take_array(self, member, value, marks);
    if (type == member->scalar)
        return take_own(self, member, value, marks);
    switch (member->kind) {
    case 'f':
        if (PyFloat_CheckExact(value) || type == self->double_type)
            return take_float(self, member, value, marks);
        return ODD;
    case 'b':
        if (value == Py_True || value == Py_False) {
            char truth = value == Py_True;
            return put(self, member, &truth, marks);
        }
        return ODD;
    case 'i':
    case 'u':
        if (PyLong_CheckExact(value))
            return take_int(self, member, value, marks);
        return ODD;
    }
    return ODD;
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

static PyObject *
Packer_step(Packer *self, PyObject *given)
{
    long marks = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Member *member = &self->members[i];
        PyObject *value = self->num_envs == 1 ? value_of(self, given, member) : NULL;
        int told = ODD;
        if (value != NULL) {
            Py_INCREF(value);
            told = take(self, member, value, &marks);
            Py_DECREF(value);
        }
        if (PyErr_Occurred())
            return NULL;
        if (told != TAKEN)
            return PyLong_FromLong(-1);
    }
    return PyLong_FromLong(self->count ? marks : -1);
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

static void
pack_rows(Packer *self, const Py_buffer *views, char *out, Py_ssize_t first,
          Py_ssize_t stop)
{
    /* A record at a time: it is in a cache while all of it is written. */
    for (Py_ssize_t row = first; row < stop; row++, out += self->view.len)
        for (Py_ssize_t i = 0; i < self->count; i++) {
            const Member *member = &self->members[i];
            if (member->offset >= 0)
                copy(out + member->offset,
                     (const char *)views[i].buf + row * member->nbytes,
                     (size_t)member->nbytes);
        }
}

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
        int told = contiguous(value, &views[i], 0);
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

static PyObject *
Packer_pack(Packer *self, PyObject *args)
{
    PyObject *given, *target, *result = NULL;
    Py_ssize_t first, stop, held;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "OOnn:pack", &given, &target, &first, &stop))
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
            pack_rows(self, views, out.buf, first, stop);
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
Packer_record(Packer *self, void *closure)
{
    (void)closure;
    Py_INCREF(self->record);
    return self->record;
}

static PyMethodDef Packer_methods[] = {
    {"step", (PyCFunction)(void (*)(void))Packer_step, METH_O, NULL},
    {"block", (PyCFunction)(void (*)(void))Packer_block, METH_O, NULL},
    {"pack", (PyCFunction)(void (*)(void))Packer_pack, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef Packer_attributes[] = {
    {"record", (getter)(void (*)(void))Packer_record, NULL, NULL, NULL},
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

/* ---- module ---------------------------------------------------------------- */

static int
execute(PyObject *module)
{
    PyType_Spec *specs[] = {&Slot_spec, &Packer_spec};
    const char *names[] = {"Slot", "Packer"};
    fill_table();
    for (int i = 0; i < 2; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (type == NULL)
            return -1;
        int told = PyModule_AddObjectRef(module, names[i], type);
        Py_DECREF(type);
        if (told < 0)
            return -1;
    }
    return 0;
}

static PyMethodDef functions[] = {
    {"mark", mark, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmreplay.kernels._rows", NULL, 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__rows(void)
{
    return PyModuleDef_Init(&module);
}
