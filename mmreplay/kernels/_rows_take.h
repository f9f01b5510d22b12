/* One value of a step, packed into its record if it needs no conversion. */

typedef struct {
    PyObject *path, *dtype, *scalar;
    Py_ssize_t *shape;
    Py_ssize_t ndim, itemsize, nbytes, offset;
    long mark;
    char kind;
    uint8_t code;
} Member;

/* A key of the mapping that holds a step: of a field, whose number is `member`, or of a
 * branch, where that is -1; the `count` keys of a branch stand right behind its own. */
typedef struct {
    PyObject *name;
    Py_ssize_t member, count;
} Key;

typedef struct {
    PyObject_HEAD
    Member *members;
    Key *keys;
    /* By member: the value of the step prepared last, where no row has its bytes. */
    PyObject **unpacked;
    Py_ssize_t count, num_keys, num_envs, stride, gaps;
    PyObject *rows, *ends, *array_type, *double_type, *dtype_name;
    Py_buffer rows_view, ends_view;
    /* Rows of a step are packed while it is prepared. */
    int together;
} RecordPacker;

enum { ACCEPTED = 0, ODD = 1, FAILED = -1 };

#include "_rows_exchange.h"

/* Copies a value's bytes into the record, and adds its mark. */
static int
put(RecordPacker *self, const Member *member, const void *bytes, long *marks)
{
    if (member->offset >= 0)
        copy((char *)self->rows_view.buf + member->offset, bytes, (size_t)member->nbytes);
    if (member->mark && *(const char *)bytes)
        *marks |= member->mark;
    return ACCEPTED;
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
same_dtype(RecordPacker *self, const Member *member, PyObject *value)
{
    PyObject *dtype = PyObject_GetAttr(value, self->dtype_name);
    if (dtype == NULL)
        return FAILED;
    int same = dtype == member->dtype ||
               PyObject_RichCompareBool(dtype, member->dtype, Py_EQ);
    Py_DECREF(dtype);
    return same;
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
    int status = contiguous(copied, view, 0);
    Py_DECREF(copied);
    return status;
}

static int
take_array(RecordPacker *self, const Member *member, PyObject *value, long *marks)
{
    Py_buffer view;
    int same = same_dtype(self, member, value);
    if (same != 1)
        return same < 0 ? FAILED : ODD;
    if (PyObject_GetBuffer(value, &view, PyBUF_STRIDED_RO) < 0) {
        PyErr_Clear();
        return ODD;
    }
    int status = same_shape(member, &view) ? ACCEPTED : ODD;
    /* Of a value that no record holds only the shape is checked. */
    int packed = member->offset >= 0 || member->mark;
    if (status == ACCEPTED && packed && PyBuffer_IsContiguous(&view, 'C'))
        status = put(self, member, view.buf, marks);
    else if (status == ACCEPTED && packed) {
        PyBuffer_Release(&view);
        if (bytes_of(value, &view) < 0)
            return FAILED;
        status = put(self, member, view.buf, marks);
    }
    PyBuffer_Release(&view);
    return status;
}

static int
take_own(RecordPacker *self, const Member *member, PyObject *value, long *marks)
{
    Py_buffer view;
    if (contiguous(value, &view, 0) < 0) {
        PyErr_Clear();
        return ODD;
    }
    int status = view.len == member->nbytes ? put(self, member, view.buf, marks) : ODD;
    PyBuffer_Release(&view);
    return status;
}

static int
take_float(RecordPacker *self, const Member *member, PyObject *value, long *marks)
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
take_int(RecordPacker *self, const Member *member, PyObject *value, long *marks)
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
    int64_t minimum = 0, maximum = INT64_MAX;
    if (member->kind == 'i') {
        maximum >>= 64 - bits;
        minimum = -maximum - 1;
    }
    else if (bits < 64)
        maximum = ((int64_t)1 << bits) - 1;
    if (number < minimum || number > maximum)
        return ODD;
    return put(self, member, &number, marks);
}

/* Long values are not packed here: their writer needs arrays. */
static int
take_exchanged(RecordPacker *self, const Member *member, const Exchanged *value, long *marks)
{
    Seen seen;
    if (member->offset < 0 && !member->mark)
        return ODD;
    if (see(value, member, &seen) != ACCEPTED || !in_order(&seen, member) ||
        !same_shape(member, &seen.view))
        return ODD;
    return put(self, member, seen.view.buf, marks);
}

static int
take(RecordPacker *self, const Member *member, PyObject *value, long *marks)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type == self->array_type)
        return take_array(self, member, value, marks);
    const Exchanged *tensor = exchanged(value);
    if (tensor)
        return take_exchanged(self, member, tensor, marks);
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
