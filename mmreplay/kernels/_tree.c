/* Trees of 16 children, in C. tree.py is the twin that defines every result. */

#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WIDTH 16
#define MAX_LEVELS 18
#define NONZERO 1
/* Searches that descend side by side: enough to keep the memory busy, few enough
 * for the nodes fetched ahead to stay in the first cache. */
#define GROUP 64
/* Leaves set at a time: their nodes stay in the second cache. */
#define CHUNK 2048
/* Batches this long are worth letting other threads run. */
#define LONG_BATCH 1024

/* While leaves are set: how far ahead they are fetched, and how far ahead written,
 * so that a sum never waits for a value that was stored just before. */
#define FETCH_AHEAD 32
#define WRITE_AHEAD 8

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)(address))
#endif
/* A node: two lines of the cache. */
#define FETCH_NODE(node) (FETCH(node), FETCH((node) + WIDTH / 2))

enum { SUM, MIN, MAX };

typedef struct {
    int depth; /* of the leaves' level; the root's is 0 */
    Py_ssize_t offset[MAX_LEVELS];
    Py_ssize_t count[MAX_LEVELS];
    Py_ssize_t num_nodes;
} Levels;

static Levels levels_of(Py_ssize_t capacity) {
    Levels l;
    Py_ssize_t count = capacity;
    l.depth = 0;
    do {
        count = (count - 1) / WIDTH + 1;
        l.depth++;
    } while (count > 1);
    l.count[l.depth] = capacity;
    for (int d = l.depth; d > 0; d--) l.count[d - 1] = (l.count[d] - 1) / WIDTH + 1;
    l.num_nodes = 0;
    for (int d = 0; d <= l.depth; d++) {
        l.offset[d] = l.num_nodes;
        l.num_nodes += ((l.count[d] - 1) / WIDTH + 1) * WIDTH;
    }
    return l;
}

static inline double sum4(const double *v) { return (v[0] + v[1]) + (v[2] + v[3]); }

static inline double sum16(const double *v) {
    return ((sum4(v) + sum4(v + 4)) + sum4(v + 8)) + sum4(v + 12);
}

static inline double min16(const double *v) {
    double minimum = v[0];
    for (int i = 1; i < WIDTH; i++) minimum = v[i] < minimum ? v[i] : minimum;
    return minimum;
}

static inline double max16(const double *v) {
    double maximum = v[0];
    for (int i = 1; i < WIDTH; i++) maximum = v[i] > maximum ? v[i] : maximum;
    return maximum;
}

static inline double reduce(const double *v, int op) {
    return op == SUM ? sum16(v) : op == MIN ? min16(v) : max16(v);
}

/* The greatest number below a positive one. */
static inline double below(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits--;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

static void reduce_level(const double *children, double *parents, Py_ssize_t count,
                         int op) {
    for (Py_ssize_t i = 0; i < count; i++)
        parents[i] = reduce(children + i * WIDTH, op);
}

/* Neighbouring leaves share a node: the last of them computes it. */
static inline int shared(const int64_t *indices, Py_ssize_t i, Py_ssize_t n, int shift) {
    return i + 1 < n && indices[i] >> shift == indices[i + 1] >> shift;
}

/* Compute the nodes of one level that are above indices, and fetch those above them. */
static void reduce_some(const double *children, double *parents, const int64_t *indices,
                        Py_ssize_t n, int shift, int op) {
    for (Py_ssize_t i = 0; i < n; i++) {
        if (shared(indices, i, n, shift)) continue;
        int64_t node = indices[i] >> shift;
        parents[node] = reduce(children + node * WIDTH, op);
        FETCH_NODE(parents + (node & -WIDTH));
    }
}

static void rebuild(double *nodes, const Levels *l, int op) {
    if (op == SUM) {
        const double *leaves = nodes + l->offset[l->depth];
        Py_ssize_t nonzero = 0;
        for (Py_ssize_t i = 0; i < l->count[l->depth]; i++) nonzero += leaves[i] != 0;
        nodes[NONZERO] = (double)nonzero;
    }
    for (int d = l->depth; d > 0; d--)
        reduce_level(nodes + l->offset[d], nodes + l->offset[d - 1], l->count[d - 1],
                     op);
}

/* Write one leaf; how many more leaves are not zero. */
static inline int write_leaf(double *leaf, double value) {
    int before = *leaf != 0;
    *leaf = value + 0.0; /* no -0.0 */
    return (value != 0) - before;
}

/* Write leaves, and compute their nodes. The node of several leaves is computed again
 * with each, the last time after the last of them is written. */
static void set_leaves(double *leaves, double *parents, const int64_t *indices,
                       const double *values, Py_ssize_t n, int op, double *nonzero) {
    int more = 0;
    for (Py_ssize_t i = -FETCH_AHEAD; i < n; i++) {
        Py_ssize_t fetched = i + FETCH_AHEAD, written = i + WRITE_AHEAD;
        if (fetched < n) FETCH_NODE(leaves + (indices[fetched] & -WIDTH));
        if (written >= 0 && written < n)
            more += write_leaf(leaves + indices[written], values[written]);
        if (i < 0 || shared(indices, i, n, 4)) continue;
        int64_t node = indices[i] >> 4;
        parents[node] = reduce(leaves + node * WIDTH, op);
        FETCH_NODE(parents + (node & -WIDTH));
    }
    if (op == SUM) *nonzero += more;
}

static void set_chunk(double *nodes, const Levels *l, int op, const int64_t *indices,
                      const double *values, Py_ssize_t n) {
    int d = l->depth - 1;
    set_leaves(nodes + l->offset[d + 1], nodes + l->offset[d], indices, values, n, op,
               nodes + NONZERO);
    for (int shift = 8; --d >= 0; shift += 4) {
        const double *children = nodes + l->offset[d + 1];
        double *parents = nodes + l->offset[d];
        if (l->count[d] <= n)
            reduce_level(children, parents, l->count[d], op);
        else
            reduce_some(children, parents, indices, n, shift, op);
    }
}

static void set_all(double *nodes, const Levels *l, int op, const int64_t *indices,
                    const double *values, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i += CHUNK)
        set_chunk(nodes, l, op, indices + i, values + i, n - i < CHUNK ? n - i : CHUNK);
}

/* Which child of a node holds a prefix sum; what is left of the sum in it. */
static inline int64_t choose(const double *node, double *rest, double *value) {
    const double x = *rest;
    double before[4], prefix[4];
    before[0] = 0;
    before[1] = sum4(node);
    before[2] = before[1] + sum4(node + 4);
    before[3] = before[2] + sum4(node + 8);
    int64_t block = (before[1] <= x) + (before[2] <= x) + (before[3] <= x);
    const double *v = node + 4 * block;
    prefix[0] = before[block];
    prefix[1] = prefix[0] + v[0];
    prefix[2] = prefix[0] + (v[0] + v[1]);
    prefix[3] = prefix[0] + ((v[0] + v[1]) + v[2]);
    int64_t child = (prefix[1] <= x) + (prefix[2] <= x) + (prefix[3] <= x);
    double left = x - prefix[child], top = below(v[child]);
    *value = v[child];
    *rest = left < top ? left : top;
    return 4 * block + child;
}

static void find_group(const double *nodes, const Levels *l, const double *sums,
                       int64_t *indices, double *values, Py_ssize_t n) {
    double rest[GROUP];
    double top = below(nodes[0]);
    for (Py_ssize_t i = 0; i < n; i++) {
        rest[i] = sums[i] < top ? sums[i] : top;
        indices[i] = 0;
    }
    for (int d = 1; d <= l->depth; d++) {
        const double *level = nodes + l->offset[d];
        const double *next = d < l->depth ? nodes + l->offset[d + 1] : level;
        int64_t last = l->count[d] - 1;
        for (Py_ssize_t i = 0; i < n; i++) {
            int64_t index = indices[i] * WIDTH;
            index += choose(level + index, rest + i, values + i);
            /* Only a tree that another thread is changing leads past the end. */
            index = index < last ? index : last;
            indices[i] = index;
            FETCH_NODE(next + index * WIDTH);
        }
    }
}

static void find_all(const double *nodes, const Levels *l, const double *sums,
                     int64_t *indices, double *values, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i += GROUP)
        find_group(nodes, l, sums + i, indices + i, values + i,
                   n - i < GROUP ? n - i : GROUP);
}

/* First index out of [0, capacity), or -1. */
static Py_ssize_t stray(const int64_t *indices, Py_ssize_t n, Py_ssize_t capacity) {
    for (Py_ssize_t i = 0; i < n; i++)
        if ((uint64_t)indices[i] >= (uint64_t)capacity) return i;
    return -1;
}

/* First value out of [low, high] or NaN, or -1. */
static Py_ssize_t improper(const double *values, Py_ssize_t n, double low, double high) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (!(values[i] >= low && values[i] <= high)) return i;
    return -1;
}

/* ---- what Python calls ---- */

typedef struct {
    Levels levels;
    Py_buffer views[4];
    int count;
} Arguments;

static void release(Arguments *a) {
    while (a->count > 0) PyBuffer_Release(&a->views[--a->count]);
}

static PyObject *refuse(Arguments *a, const char *message) {
    release(a);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

static int acquire(Arguments *a, PyObject *array, int writable) {
    Py_buffer *view = &a->views[a->count];
    if (PyObject_GetBuffer(array, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    a->count++;
    return view->itemsize == 8 ? 0 : -1;
}

/* Hold the tree and n more arrays, of one length; bit i of writable: array i. */
static int take(Arguments *a, PyObject *tree, PyObject *capacity, PyObject *const *rest,
                int n, int writable) {
    Py_ssize_t leaves = PyLong_AsSsize_t(capacity);
    a->count = 0;
    if (leaves < 1 || acquire(a, tree, writable & 1) < 0) return -1;
    a->levels = levels_of(leaves);
    if (a->views[0].len / 8 != a->levels.num_nodes) return -1;
    for (int i = 0; i < n; i++)
        if (acquire(a, rest[i], writable >> (i + 1) & 1) < 0 ||
            a->views[i + 1].len != a->views[1].len)
            return -1;
    return 0;
}

#define MISFIT "arrays or capacity do not fit the tree"
#define LENGTH(a) ((a).views[1].len / 8)

static PyObject *py_set(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {.count = 0};
    (void)self;
    if (count != 7) return refuse(&a, "set_leaves takes 7 arguments");
    long op = PyLong_AsLong(args[2]);
    double low = PyFloat_AsDouble(args[3]), high = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred() || take(&a, args[0], args[1], args + 5, 2, 1) < 0)
        return refuse(&a, MISFIT);
    Py_ssize_t n = LENGTH(a), capacity = a.levels.count[a.levels.depth];
    /* Another thread may change the caller's arrays at any time, the GIL being held or
     * not: what is checked and what is written are the same copy. */
    int64_t few_indices[LONG_BATCH], *indices = few_indices;
    double few_values[LONG_BATCH], *values = few_values;
    size_t size = (size_t)n * sizeof *indices;
    if (n >= LONG_BATCH) {
        indices = malloc(size);
        values = malloc(size);
        if (!indices || !values) {
            free(indices);
            free(values);
            PyErr_NoMemory();
            return refuse(&a, MISFIT);
        }
    }
    PyThreadState *state = n >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    memcpy(indices, a.views[1].buf, size);
    memcpy(values, a.views[2].buf, size);
    Py_ssize_t index = stray(indices, n, capacity);
    Py_ssize_t value = improper(values, index < 0 ? n : index, low, high);
    Py_ssize_t bad = value < 0 ? index : value;
    if (bad < 0 && n > 0) set_all(a.views[0].buf, &a.levels, (int)op, indices, values, n);
    if (n >= LONG_BATCH) {
        free(indices);
        free(values);
    }
    if (state) PyEval_RestoreThread(state);
    release(&a);
    return PyLong_FromSsize_t(bad);
}

static PyObject *py_get(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {.count = 0};
    (void)self;
    if (count != 4) return refuse(&a, "get_leaves takes 4 arguments");
    if (take(&a, args[0], args[1], args + 2, 2, 4) < 0) return refuse(&a, MISFIT);
    Py_ssize_t n = LENGTH(a), capacity = a.levels.count[a.levels.depth];
    const int64_t *indices = a.views[1].buf;
    const double *leaves = (const double *)a.views[0].buf + a.levels.offset[a.levels.depth];
    double *out = a.views[2].buf;
    Py_ssize_t bad = -1;
    PyThreadState *state = n >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < n && bad < 0; i++) {
        /* Read once: another thread may change it between a check and its use. */
        int64_t index = *(const volatile int64_t *)(indices + i);
        if ((uint64_t)index >= (uint64_t)capacity)
            bad = i;
        else
            out[i] = leaves[index];
    }
    if (state) PyEval_RestoreThread(state);
    release(&a);
    return PyLong_FromSsize_t(bad);
}

static PyObject *py_find(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {.count = 0};
    (void)self;
    if (count != 5) return refuse(&a, "find_leaves takes 5 arguments");
    if (take(&a, args[0], args[1], args + 2, 3, 12) < 0) return refuse(&a, MISFIT);
    Py_ssize_t n = LENGTH(a);
    const double *nodes = a.views[0].buf, *sums = a.views[1].buf;
    PyThreadState *state = n >= LONG_BATCH ? PyEval_SaveThread() : NULL;
    double total = nodes[0];
    Py_ssize_t bad = total > 0 ? improper(sums, n, 0, total) : n > 0 ? 0 : -1;
    if (bad < 0) find_all(nodes, &a.levels, sums, a.views[2].buf, a.views[3].buf, n);
    if (state) PyEval_RestoreThread(state);
    release(&a);
    return PyLong_FromSsize_t(bad);
}

static PyObject *py_rebuild(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arguments a = {.count = 0};
    (void)self;
    if (count != 3) return refuse(&a, "rebuild takes 3 arguments");
    long op = PyLong_AsLong(args[2]);
    if (PyErr_Occurred() || take(&a, args[0], args[1], NULL, 0, 1) < 0)
        return refuse(&a, MISFIT);
    Py_BEGIN_ALLOW_THREADS
    rebuild(a.views[0].buf, &a.levels, (int)op);
    Py_END_ALLOW_THREADS
    release(&a);
    Py_RETURN_NONE;
}

#include "_tree_draw.h"

#define METHOD(name, function) \
    {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD("set_leaves", py_set), METHOD("get_leaves", py_get),
    METHOD("find_leaves", py_find), METHOD("rebuild", py_rebuild),
    METHOD("draw_leaves", py_draw), METHOD("add_to_open", py_add),
    {"shorten", py_shorten, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmreplay.kernels._tree", NULL, 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tree(void) { return PyModuleDef_Init(&module); }
