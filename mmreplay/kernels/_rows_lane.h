/* Steps taken, stored and published by one call; lane.py says what each does. */

#include <time.h>

enum { RECORDS, FLAGS, COMMIT, LIMITS, TAILS, LEASED };

typedef struct {
    PyObject_HEAD
    Packer *packer;
    Slot *slot;
    Py_buffer held[LEASED];
    Py_ssize_t low, high;
    double until;
    int leased;
    /* Places whose bytes between columns and checksum are known to be zeros. */
    Py_ssize_t blank[2];
    int blanks;
} Lane;

static void
let_go(Lane *self)
{
    self->leased = self->blanks = 0;
    for (int i = 0; i < LEASED; i++)
        if (self->held[i].obj)
            PyBuffer_Release(&self->held[i]);
}

/* An attribute's type, and whether an object is one. */
static int
is_a(PyObject *module, const char *name, PyObject *object)
{
    PyObject *type = PyObject_GetAttrString(module, name);
    if (type == NULL)
        return -1;
    int told = PyObject_IsInstance(object, type);
    Py_DECREF(type);
    return told;
}

static PyObject *
Lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *packer, *slot, *module = PyType_GetModule(type);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (module == NULL || !PyArg_ParseTuple(args, "OO:Lane", &packer, &slot))
        return NULL;
    if (kwargs && PyDict_Size(kwargs))
        return PyErr_Format(PyExc_TypeError, "Lane takes no keywords");
    int first = is_a(module, "Packer", packer), second = is_a(module, "Slot", slot);
    if (first < 0 || second < 0)
        return NULL;
    if (!first || !second)
        return PyErr_Format(PyExc_TypeError, "Lane: expected a Packer and a Slot");
    if (((Packer *)packer)->num_envs != ((Slot *)slot)->num_envs)
        return PyErr_Format(PyExc_ValueError,
                            "Lane: got a packer of %zd environments and a slot of %zd, "
                            "expected as many",
                            ((Packer *)packer)->num_envs, ((Slot *)slot)->num_envs);
    Lane *self = (Lane *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->packer = (Packer *)Py_NewRef(packer);
    self->slot = (Slot *)Py_NewRef(slot);
    return (PyObject *)self;
}

static void
Lane_dealloc(Lane *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    let_go(self);
    Py_XDECREF((PyObject *)self->packer);
    Py_XDECREF((PyObject *)self->slot);
    release(self);
    Py_DECREF(type);
}

static PyObject *
Lane_revoke(Lane *self, PyObject *unused)
{
    (void)unused;
    let_go(self);
    Py_RETURN_NONE;
}

/* Whether everything a step may touch lies inside what is held. */
static int
lease_fits(const Lane *self)
{
    Py_ssize_t envs = self->packer->num_envs, stride = self->packer->view.len;
    return self->low >= 0 && self->low <= self->high && stride > 0 &&
           (envs == 1 || self->packer->together) &&
           self->high <= self->held[FLAGS].len &&
           self->high <= self->held[RECORDS].len / stride &&
           self->held[LIMITS].len == 8 * envs && self->held[TAILS].len == 8 * envs;
}

static PyObject *
Lane_lease(Lane *self, PyObject *args)
{
    PyObject *given[LEASED];
    Py_ssize_t low, high;
    double until;
    if (!PyArg_ParseTuple(args, "OOOOOnnd:lease", &given[RECORDS], &given[FLAGS],
                          &given[COMMIT], &given[LIMITS], &given[TAILS], &low, &high,
                          &until))
        return NULL;
    let_go(self);
    for (int i = 0; i < LEASED; i++)
        if (contiguous(given[i], &self->held[i], i <= COMMIT) < 0) {
            let_go(self);
            return NULL;
        }
    self->low = low;
    self->high = high;
    self->until = until;
    if (!lease_fits(self)) {
        let_go(self);
        return PyErr_Format(PyExc_ValueError,
                            "lease: expected rows of the files, packed together");
    }
    self->leased = 1;
    Py_RETURN_NONE;
}

static int
in_time(const Lane *self)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec < self->until;
}

static int
is_blank(Lane *self, Py_ssize_t place)
{
    const Slot *slot = self->slot;
    const char *there = (const char *)self->held[COMMIT].buf + place;
    for (int i = 0; i < self->blanks; i++)
        if (self->blank[i] == place)
            return 1;
    for (Py_ssize_t at = slot->filled; at < slot->view.len - 4; at++)
        if (there[at])
            return 0;
    if (self->blanks < 2)
        self->blank[self->blanks++] = place;
    return 1;
}

/* All of a publication, or but for zeros where zeros are: to store 4 KiB a step has
 * the first cache hold little else. */
static void
store_slot(Lane *self, Py_ssize_t place)
{
    const Slot *slot = self->slot;
    const char *from = slot->view.buf;
    char *to = (char *)self->held[COMMIT].buf + place;
    size_t nbytes = (size_t)slot->view.len;
    if (!is_blank(self, place)) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, (size_t)slot->filled);
    memcpy(to + nbytes - 4, from + nbytes - 4, 4);
}

/* Puts a step where it belongs, and then its publication. */
static void
store_step(Lane *self, Py_ssize_t row, Py_ssize_t place)
{
    Packer *packer = self->packer;
    const Py_buffer *step = packer->num_envs > 1 ? &packer->rows_view : &packer->view;
    memcpy((char *)self->held[RECORDS].buf + row * packer->view.len, step->buf,
           (size_t)step->len);
    memset((char *)self->held[FLAGS].buf + row, 0, (size_t)packer->num_envs);
    /* Who sees the publication sees the step. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    store_slot(self, place);
}

static PyObject *
Lane_add(Lane *self, PyObject *const *args, Py_ssize_t given)
{
    Packer *packer = self->packer;
    Slot *slot = self->slot;
    if (given != 5)
        return PyErr_Format(PyExc_TypeError, "add: got %zd arguments, expected 5",
                            given);
    Py_ssize_t row = PyLong_AsSsize_t(args[1]), place = PyLong_AsSsize_t(args[2]);
    unsigned long long number = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (!self->leased || row < self->low || row > self->high - packer->num_envs ||
        !in_time(self))
        Py_RETURN_FALSE;
    if (place < 0 || place > self->held[COMMIT].len - slot->view.len)
        return PyErr_Format(PyExc_ValueError, "add: expected a place for a publication");
    PyObject *marks = packer->num_envs > 1 ? Packer_wide(packer, args[0])
                                           : Packer_step(packer, args[0]);
    if (marks == NULL)
        return NULL;
    long ends = PyLong_AsLong(marks);
    Py_DECREF(marks);
    if (ends || !self->leased || row < self->low ||
        row > self->high - packer->num_envs)
        Py_RETURN_FALSE;
    if (put_column(slot, 0, args[4]) < 0)
        return NULL;
    char *columns = (char *)slot->view.buf + slot->columns;
    Py_ssize_t nbytes = 8 * slot->num_envs;
    memcpy(columns + nbytes, self->held[LIMITS].buf, (size_t)nbytes);
    memcpy(columns + 2 * nbytes, self->held[TAILS].buf, (size_t)nbytes);
    seal(slot, (uint64_t)number);
    store_step(self, row, place);
    Py_RETURN_TRUE;
}

static PyMethodDef Lane_methods[] = {
    {"lease", (PyCFunction)(void (*)(void))Lane_lease, METH_VARARGS, NULL},
    {"revoke", (PyCFunction)(void (*)(void))Lane_revoke, METH_NOARGS, NULL},
    {"add", (PyCFunction)(void (*)(void))Lane_add, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot Lane_slots[] = {
    {Py_tp_new, (void *)Lane_new},
    {Py_tp_dealloc, (void *)Lane_dealloc},
    {Py_tp_methods, Lane_methods},
    {0, NULL},
};
static PyType_Spec Lane_spec = {
    "mmreplay.kernels._rows.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT, Lane_slots,
};
