/* Values that come as DLPack capsules of any library, read without a call to it.
 * https://dmlc.github.io/dlpack has the layout, version 0. */

enum { ON_CPU = 1, MAX_AXES = 16 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BOOL = 6, DL_NONE = 255 };

typedef struct {
    void *data;
    int32_t device, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Exchanged;

typedef struct {
    Py_buffer view;
    Py_ssize_t shape[MAX_AXES], strides[MAX_AXES];
} Seen;

static const Exchanged *
exchanged(PyObject *value)
{
    if (!PyCapsule_CheckExact(value) || !PyCapsule_IsValid(value, "dltensor"))
        return NULL;
    return PyCapsule_GetPointer(value, "dltensor");
}

/* The code of a field's dtype. */
static int
code_of(PyObject *dtype, uint8_t *code)
{
    PyObject *kind = PyObject_GetAttrString(dtype, "kind");
    const char *name = kind ? PyUnicode_AsUTF8AndSize(kind, NULL) : NULL;
    *code = DL_NONE;
    if (name)
        switch (*name) {
        case 'b': *code = DL_BOOL; break;
        case 'i': *code = DL_INT; break;
        case 'u': *code = DL_UINT; break;
        case 'f': *code = DL_FLOAT; break;
        }
    Py_XDECREF(kind);
    return name ? 0 : -1;
}

/* Shows a capsule's values as an array's, with strides, in bytes; ends that come as
 * [n, 1] as [n]. ODD where they are elsewhere, of another dtype or of other axes than
 * the field's, behind one of any length; or nowhere. */
static int
see(const Exchanged *tensor, const Member *member, Seen *seen)
{
    Py_ssize_t ndim = tensor->ndim, lead;
    if (tensor->device != ON_CPU || tensor->lanes != 1 || tensor->code != member->code ||
        tensor->bits != 8 * member->itemsize || tensor->data == NULL)
        return ODD;
    if (ndim == 2 && member->mark && !member->ndim && tensor->shape[1] == 1)
        ndim--;
    lead = ndim - member->ndim;
    if (lead < 0 || lead > 1 || ndim > MAX_AXES)
        return ODD;
    for (Py_ssize_t i = 0; i < member->ndim; i++)
        if (tensor->shape[lead + i] != member->shape[i])
            return ODD;
    size_t itemsize = (size_t)member->itemsize, nbytes = itemsize;
    for (Py_ssize_t i = ndim; i > 0; i--) {
        /* Of an axis of 1 torch says any stride: it may not be a number of bytes. */
        size_t stride = tensor->strides ? (size_t)tensor->strides[i - 1] * itemsize : nbytes;
        seen->shape[i - 1] = (Py_ssize_t)tensor->shape[i - 1];
        seen->strides[i - 1] = (Py_ssize_t)stride;
        nbytes *= (size_t)tensor->shape[i - 1];
    }
    seen->view = (Py_buffer){
        .buf = (char *)tensor->data + tensor->offset,
        .len = (Py_ssize_t)nbytes,
        .ndim = (int)ndim,
        .shape = seen->shape,
        .strides = seen->strides,
    };
    return ACCEPTED;
}

/* Whether the field's own axes lie one behind the other. */
static int
in_order(const Seen *seen, const Member *member)
{
    Py_ssize_t nbytes = member->itemsize, lead = seen->view.ndim - member->ndim;
    for (Py_ssize_t i = member->ndim; i > 0; i--) {
        if (member->shape[i - 1] != 1 && seen->strides[lead + i - 1] != nbytes)
            return 0;
        nbytes *= member->shape[i - 1];
    }
    return 1;
}
