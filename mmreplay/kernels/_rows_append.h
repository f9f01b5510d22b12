/* Steps and blocks stored and published by one call; append.py says what each does. */

#include <time.h>

enum { RECORDS, FLAGS, COMMIT, LIMITS, TAILS, HEAP_TAILS, NUM_VIEWS };

typedef struct {
    PyObject_HEAD
    RecordPacker *packer;
    Slot *slot;
    Py_buffer views[NUM_VIEWS];
    Py_ssize_t low, high;
    double until;
    int reserved;
    /* Slots whose bytes between columns and checksum are known to be zeros. */
    Py_ssize_t blank[2];
    int blanks;
} Append;

static void
release_views(Append *self)
{
    self->reserved = self->blanks = 0;
    for (int i = 0; i < NUM_VIEWS; i++)
        if (self->views[i].obj)
            PyBuffer_Release(&self->views[i]);
}

/* An attribute's type, and whether an object is one. */
static int
is_a(PyObject *module, const char *name, PyObject *object)
{
    PyObject *type = PyObject_GetAttrString(module, name);
    if (type == NULL)
        return -1;
    int result = PyObject_IsInstance(object, type);
    Py_DECREF(type);
    return result;
}

static PyObject *
Append_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *packer, *slot, *module = PyType_GetModule(type);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (module == NULL || !PyArg_ParseTuple(args, "OO:Append", &packer, &slot))
        return NULL;
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "Append takes no keywords");
    int first = is_a(module, "RecordPacker", packer), second = is_a(module, "Slot", slot);
    if (first < 0 || second < 0)
        return NULL;
    if (!first || !second)
        return PyErr_Format(PyExc_TypeError, "Append takes a RecordPacker and a Slot");
    if (((RecordPacker *)packer)->num_envs != ((Slot *)slot)->num_envs)
        return PyErr_Format(PyExc_ValueError,
                            "Append: packer and slot must have the same environments, "
                            "got %zd and %zd",
                            ((RecordPacker *)packer)->num_envs, ((Slot *)slot)->num_envs);
    Append *self = (Append *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->packer = (RecordPacker *)Py_NewRef(packer);
    self->slot = (Slot *)Py_NewRef(slot);
    return (PyObject *)self;
}

static void
Append_dealloc(Append *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_views(self);
    Py_XDECREF((PyObject *)self->packer);
    Py_XDECREF((PyObject *)self->slot);
    release(self);
    Py_DECREF(type);
}

static PyObject *
Append_release(Append *self, PyObject *unused)
{
    (void)unused;
    release_views(self);
    Py_RETURN_NONE;
}

/* Whether all bytes that a step may change lie inside the views. */
static int
reservation_fits(const Append *self)
{
    Py_ssize_t envs = self->packer->num_envs, stride = self->packer->stride;
    return self->low >= 0 && self->low <= self->high && stride > 0 &&
           self->packer->together &&
           self->high <= self->views[FLAGS].len &&
           self->high <= self->views[RECORDS].len / stride &&
           self->views[LIMITS].len == 8 * envs && self->views[TAILS].len == 8 * envs &&
           (!has_heap(self->slot) || self->views[HEAP_TAILS].len == 8 * envs);
}

static PyObject *
Append_reserve(Append *self, PyObject *args)
{
    PyObject *nargs[NUM_VIEWS] = {NULL};
    Py_ssize_t low, high;
    double until;
    if (!PyArg_ParseTuple(args, "OOOOOnnd|O:reserve", &nargs[RECORDS], &nargs[FLAGS],
                          &nargs[COMMIT], &nargs[LIMITS], &nargs[TAILS], &low, &high,
                          &until, &nargs[HEAP_TAILS]))
        return NULL;
    release_views(self);
    int num_views = has_heap(self->slot) ? NUM_VIEWS : HEAP_TAILS;
    if (num_views == NUM_VIEWS && nargs[HEAP_TAILS] == NULL)
        return PyErr_Format(PyExc_ValueError, "reserve: heap tails must be given");
    for (int i = 0; i < num_views; i++)
        if (contiguous(nargs[i], &self->views[i], i <= COMMIT) < 0) {
            release_views(self);
            return NULL;
        }
    self->low = low;
    self->high = high;
    self->until = until;
    if (!reservation_fits(self)) {
        release_views(self);
        return PyErr_Format(PyExc_ValueError,
                            "reserve: rows must be in the files, packed together");
    }
    self->reserved = 1;
    Py_RETURN_NONE;
}

static int
in_time(const Append *self)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec < self->until;
}

static int
is_blank(Append *self, Py_ssize_t offset)
{
    const Slot *slot = self->slot;
    const char *there = (const char *)self->views[COMMIT].buf + offset;
    for (int i = 0; i < self->blanks; i++)
        if (self->blank[i] == offset)
            return 1;
    for (Py_ssize_t at = slot->filled; at < slot->view.len - 4; at++)
        if (there[at])
            return 0;
    if (self->blanks < 2)
        self->blank[self->blanks++] = offset;
    return 1;
}

/* Stores a publication, without its zeros where the file has them already: 4 KiB stored
 * at each step would fill the first cache. */
static void
store_slot(Append *self, Py_ssize_t offset)
{
    const Slot *slot = self->slot;
    const char *from = slot->view.buf;
    char *to = (char *)self->views[COMMIT].buf + offset;
    size_t nbytes = (size_t)slot->view.len;
    if (!is_blank(self, offset)) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, (size_t)slot->filled);
    memcpy(to + nbytes - 4, from + nbytes - 4, 4);
}

/* Stores a step in its rows, and then its publication. */
static void
store_step(Append *self, Py_ssize_t row, Py_ssize_t offset)
{
    RecordPacker *packer = self->packer;
    const Py_buffer *step = &packer->rows_view;
    memcpy((char *)self->views[RECORDS].buf + row * packer->stride, step->buf,
           (size_t)step->len);
    memset((char *)self->views[FLAGS].buf + row, 0, (size_t)packer->num_envs);
    /* A reader that sees the publication sees the step. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    store_slot(self, offset);
}

static PyObject *
Append_add(Append *self, PyObject *const *args, Py_ssize_t nargs)
{
    RecordPacker *packer = self->packer;
    Slot *slot = self->slot;
    int heap = has_heap(slot);
    if (nargs != 5 + heap)
        return PyErr_Format(PyExc_TypeError, "add takes %d arguments, got %zd", 5 + heap,
                            nargs);
    Py_ssize_t row = PyLong_AsSsize_t(args[1]), offset = PyLong_AsSsize_t(args[2]);
    unsigned long long number = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (!self->reserved || row < self->low || row > self->high - packer->num_envs ||
        !in_time(self))
        Py_RETURN_FALSE;
    if (offset < 0 || offset > self->views[COMMIT].len - slot->view.len)
        return PyErr_Format(PyExc_ValueError, "add: offset must be of a publication");
    long ends = prepare(packer, args[0]);
    if (ends == FAILED_STEP)
        return NULL;
    if (ends || !self->reserved || row < self->low ||
        row > self->high - packer->num_envs)
        Py_RETURN_FALSE;
    if (put_column(slot, 0, args[4]) < 0 || (heap && put_column(slot, 4, args[5]) < 0))
        return NULL;
    char *columns = (char *)slot->view.buf + slot->columns;
    Py_ssize_t nbytes = 8 * slot->num_envs;
    memcpy(columns + nbytes, self->views[LIMITS].buf, (size_t)nbytes);
    memcpy(columns + 2 * nbytes, self->views[TAILS].buf, (size_t)nbytes);
    if (heap)
        memcpy(columns + 5 * nbytes, self->views[HEAP_TAILS].buf, (size_t)nbytes);
    seal(slot, (uint64_t)number);
    store_step(self, row, offset);
    Py_RETURN_TRUE;
}

/* Whether a block lies inside the files, and its publication in COMMIT. */
static int
block_fits(const Append *self, const Py_buffer *flags, const Py_buffer *files,
           Py_ssize_t first, Py_ssize_t row, Py_ssize_t offset)
{
    Py_ssize_t stride = self->packer->stride, count = flags->len;
    return stride > 0 && count > 0 && first >= 0 && first <= PY_SSIZE_T_MAX - count &&
           row >= 0 && row <= files[FLAGS].len - count &&
           row <= files[RECORDS].len / stride - count && offset >= 0 &&
           offset <= files[COMMIT].len - self->slot->view.len;
}

static int
extend_files(Append *self, PyObject *const *args, const Py_buffer *flags,
             const Py_buffer *files)
{
    RecordPacker *packer = self->packer;
    Slot *slot = self->slot;
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), row = PyLong_AsSsize_t(args[4]);
    Py_ssize_t offset = PyLong_AsSsize_t(args[7]);
    unsigned long long number = PyLong_AsUnsignedLongLong(args[8]);
    if (PyErr_Occurred())
        return -1;
    if (!block_fits(self, flags, files, first, row, offset)) {
        PyErr_Format(PyExc_ValueError,
                     "extend: rows must be in the files, and offset of a publication");
        return -1;
    }
    char *out = (char *)files[RECORDS].buf + row * packer->stride;
    if (pack_columns(packer, args[0], out, first, first + flags->len, stream_rows) < 0)
        return -1;
    memcpy((char *)files[FLAGS].buf + row, flags->buf, (size_t)flags->len);
    for (int which = 0; which < 3; which++)
        if (put_column(slot, which, args[9 + which]) < 0)
            return -1;
    seal(slot, (uint64_t)number);
    /* A reader that sees the publication sees the rows. Those were stored past the caches,
     * which this fence alone does not order: `stream_rows` ended with one that does. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy((char *)files[COMMIT].buf + offset, slot->view.buf, (size_t)slot->view.len);
    return 0;
}

static PyObject *
Append_extend(Append *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { NUM_ARGS = 12, COLUMN_FLAGS = 2, FILES = 3 };
    /* Where the mappings stand among the arguments. */
    static const int at[FILES] = {[RECORDS] = 3, [FLAGS] = 5, [COMMIT] = 6};
    Py_buffer flags, files[FILES];
    int acquired = 0, done = -1;
    if (has_heap(self->slot))
        return PyErr_Format(PyExc_ValueError, "extend: it publishes no heap");
    if (nargs != NUM_ARGS)
        return PyErr_Format(PyExc_TypeError, "extend takes %d arguments, got %zd",
                            NUM_ARGS, nargs);
    if (contiguous(args[COLUMN_FLAGS], &flags, 0) < 0)
        return NULL;
    while (acquired < FILES && contiguous(args[at[acquired]], &files[acquired], 1) == 0)
        acquired++;
    if (acquired == FILES)
        done = extend_files(self, args, &flags, files);
    while (acquired--)
        PyBuffer_Release(&files[acquired]);
    PyBuffer_Release(&flags);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef Append_methods[] = {
    {"reserve", (PyCFunction)(void (*)(void))Append_reserve, METH_VARARGS, NULL},
    {"release", (PyCFunction)(void (*)(void))Append_release, METH_NOARGS, NULL},
    {"add", (PyCFunction)(void (*)(void))Append_add, METH_FASTCALL, NULL},
    {"extend", (PyCFunction)(void (*)(void))Append_extend, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot Append_slots[] = {
    {Py_tp_new, (void *)Append_new},
    {Py_tp_dealloc, (void *)Append_dealloc},
    {Py_tp_methods, Append_methods},
    {0, NULL},
};
static PyType_Spec Append_spec = {
    "mmreplay.kernels._rows.Append", sizeof(Append), 0, Py_TPFLAGS_DEFAULT, Append_slots,
};
