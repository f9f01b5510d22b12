/* Steps: drawn, judged and placed. steps.py is the twin of each, and says what it
 * does; both give the same bytes and refuse the same things. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#ifndef __SIZEOF_INT128__
#error "the twins in steps.py serve where no product of 128 bits is"
#endif

#define FETCH(address) __builtin_prefetch(address)

enum { TERMINATED = 2, FINAL = 8, ALL_FLAGS = 63 };
enum { MAX_ARRAYS = 7 };
/* Rows looked up before the first of their flags is read. */
enum { GROUP = 64 };

/* ---- arguments --------------------------------------------------------------- */

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

static int
expect(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: got %zd arguments, expected %zd", name, given,
                 wanted);
    return -1;
}

typedef struct {
    int64_t slots, num_envs, of_env, of_slot;
} Ring;

/* slots, num_envs and time_major, as Ring has them. */
static int
read_ring(PyObject *const *args, Ring *ring)
{
    ring->slots = PyLong_AsLongLong(args[0]);
    ring->num_envs = PyLong_AsLongLong(args[1]);
    int time_major = PyObject_IsTrue(args[2]);
    if (PyErr_Occurred())
        return -1;
    if (ring->slots < 1 || ring->num_envs < 1 ||
        ring->slots > INT64_MAX / ring->num_envs) {
        PyErr_SetString(PyExc_ValueError, "expected slots and environments");
        return -1;
    }
    ring->of_env = time_major ? 1 : ring->slots;
    ring->of_slot = time_major ? ring->num_envs : 1;
    return 0;
}

static inline int
outside(const Ring *ring, int64_t env_id, int64_t position)
{
    return env_id < 0 || env_id >= ring->num_envs || position < 0 ||
           position == INT64_MAX;
}

/* Rows of a position and of the one after it. */
static inline void
rows_of(const Ring *ring, int64_t env_id, int64_t position, int64_t *row,
        int64_t *following)
{
    int64_t slot = position % ring->slots, base = env_id * ring->of_env;
    int64_t next = slot + 1 == ring->slots ? 0 : slot + 1;
    *row = base + slot * ring->of_slot;
    *following = base + next * ring->of_slot;
}

/* ---- random numbers ---------------------------------------------------------- */

typedef struct {
    uint64_t key, block, step, values[4];
    int used;
} Philox;

static inline uint64_t
product(uint64_t a, uint64_t b, uint64_t *high)
{
    unsigned __int128 wide = (unsigned __int128)a * b;
    *high = (uint64_t)(wide >> 64);
    return (uint64_t)wide;
}

/* Philox4x64-10, counter [block, step, 0, 0], key [seed, 0]. */
static void
refill(Philox *p)
{
    uint64_t c0 = ++p->block, c1 = p->step, c2 = 0, c3 = 0, k0 = p->key, k1 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t high0, high1;
        uint64_t low0 = product(0xD2E7470EE14C6C93u, c0, &high0);
        uint64_t low1 = product(0xCA5A826395121157u, c2, &high1);
        c0 = high1 ^ c1 ^ k0;
        c2 = high0 ^ c3 ^ k1;
        c1 = low1;
        c3 = low0;
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    p->values[0] = c0;
    p->values[1] = c1;
    p->values[2] = c2;
    p->values[3] = c3;
    p->used = 0;
}

static inline double
share(Philox *p)
{
    if (p->used == 4)
        refill(p);
    return (double)(p->values[p->used++] >> 11) * (1.0 / 9007199254740992.0);
}

static int
read_philox(PyObject *const *args, Philox *p)
{
    *p = (Philox){.used = 4};
    p->key = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return -1;
    p->step = PyLong_AsUnsignedLongLong(args[1]);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- functions --------------------------------------------------------------- */

static PyObject *
shares(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "shares"};
    Philox random;
    Py_ssize_t count;
    (void)module;
    if (expect(held.name, given, 3) < 0 || read_philox(args, &random) < 0)
        return NULL;
    double *out = hold(&held, args[2], 1, &count, 8);
    if (out == NULL)
        return release(&held, NULL);
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = share(&random);
    return release(&held, Py_NewRef(Py_None));
}

/* The first of growing ends above a rank. */
static inline Py_ssize_t
stretch_of(const int64_t *ends, Py_ssize_t count, int64_t rank)
{
    Py_ssize_t low = 0;
    while (count > 1) {
        Py_ssize_t half = count / 2;
        low += ends[low + half - 1] <= rank ? half : 0;
        count -= half;
    }
    return low;
}

static PyObject *
pick(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "pick"};
    Philox random;
    Py_ssize_t envs, same, count, places;
    (void)module;
    if (expect(held.name, given, 6) < 0 || read_philox(args, &random) < 0)
        return NULL;
    const int64_t *ends, *stops;
    int64_t *env_ids, *positions;
    if (!(ends = hold(&held, args[2], 0, &envs, 8)) ||
        !(stops = hold(&held, args[3], 0, &same, 8)) ||
        !(env_ids = hold(&held, args[4], 1, &count, 8)) ||
        !(positions = hold(&held, args[5], 1, &places, 8)))
        return release(&held, NULL);
    if (envs < 1 || envs != same || count != places || ends[envs - 1] < 1)
        return refuse(&held, "expected an end and a stop of each environment, rows to "
                             "pick from, and room for as many environments as "
                             "positions");
    double total = (double)ends[envs - 1];
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t rank = (int64_t)(share(&random) * total);
        Py_ssize_t env_id = stretch_of(ends, envs, rank);
        env_ids[i] = env_id;
        positions[i] = stops[env_id] - (ends[env_id] - rank);
    }
    return release(&held, Py_NewRef(Py_None));
}

#define STRAY "expected known environments and positions of at least 0"
#define MISFIT "expected flags of every row, and arrays of one length"

static PyObject *
legal(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "legal"};
    Ring ring;
    Py_ssize_t rows, count, places, verdicts, room;
    (void)module;
    if (expect(held.name, given, 8) < 0 || read_ring(args + 3, &ring) < 0)
        return NULL;
    const uint8_t *flags, *law;
    const int64_t *env_ids, *positions;
    uint8_t *out;
    if (!(flags = hold(&held, args[0], 0, &rows, 1)) ||
        !(env_ids = hold(&held, args[1], 0, &count, 8)) ||
        !(positions = hold(&held, args[2], 0, &places, 8)) ||
        !(law = hold(&held, args[6], 0, &verdicts, 1)) ||
        !(out = hold(&held, args[7], 1, &room, 1)))
        return release(&held, NULL);
    if (rows != ring.slots * ring.num_envs || count != places || count != room ||
        verdicts != (ALL_FLAGS + 1) * (ALL_FLAGS + 1))
        return refuse(&held, MISFIT);
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        Py_ssize_t some = count - first < GROUP ? count - first : GROUP;
        int64_t here[GROUP], after[GROUP];
        for (Py_ssize_t i = 0; i < some; i++) {
            int64_t env_id = env_ids[first + i], position = positions[first + i];
            if (outside(&ring, env_id, position))
                return refuse(&held, STRAY);
            rows_of(&ring, env_id, position, &here[i], &after[i]);
            FETCH(flags + here[i]);
            FETCH(flags + after[i]);
        }
        for (Py_ssize_t i = 0; i < some; i++)
            out[first + i] =
                law[(flags[here[i]] & ALL_FLAGS) << 6 | (flags[after[i]] & ALL_FLAGS)];
    }
    return release(&held, Py_NewRef(Py_None));
}

typedef struct {
    const uint8_t *flags, *bits;
    const int64_t *env_ids, *positions, *heads;
    int64_t *out;
    uint8_t *ends;
    Py_ssize_t count, kinds;
    int paired, bare;
} Placing;

/* Rows of all steps and of those after, and their flags on the way to the caches. */
static int
rows_of_all(const Placing *p, const Ring *ring)
{
    for (Py_ssize_t i = 0; i < p->count; i++) {
        int64_t row, following;
        if (outside(ring, p->env_ids[i], p->positions[i]))
            return -1;
        rows_of(ring, p->env_ids[i], p->positions[i], &row, &following);
        FETCH(p->flags + row);
        if (p->paired) {
            FETCH(p->flags + following);
            p->out[2 * i] = row;
            p->out[2 * i + 1] = following;
        }
        else
            p->out[i] = row;
    }
    return 0;
}

static void
flags_of_all(const Placing *p)
{
    int width = p->paired ? 2 : 1;
    for (Py_ssize_t i = 0; i < p->count; i++) {
        int64_t *rows = p->out + width * i;
        uint8_t here = p->flags[rows[0]];
        for (Py_ssize_t kind = 0; kind < p->kinds; kind++)
            p->ends[kind * p->count + i] = (here & p->bits[kind]) != 0;
        if (p->paired && p->bare && (here & TERMINATED) &&
            !((p->flags[rows[1]] & FINAL) &&
              p->positions[i] + 1 < p->heads[p->env_ids[i]]))
            rows[1] = rows[0];
    }
}

static PyObject *
place(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "place"};
    Placing p;
    Ring ring;
    Py_ssize_t rows, places, envs, room, marks;
    (void)module;
    if (expect(held.name, given, 11) < 0 || read_ring(args + 4, &ring) < 0)
        return NULL;
    if ((p.bare = PyObject_IsTrue(args[8])) < 0 ||
        !(p.flags = hold(&held, args[0], 0, &rows, 1)) ||
        !(p.env_ids = hold(&held, args[1], 0, &p.count, 8)) ||
        !(p.positions = hold(&held, args[2], 0, &places, 8)) ||
        !(p.heads = hold(&held, args[3], 0, &envs, 8)) ||
        !(p.bits = hold(&held, args[7], 0, &p.kinds, 1)) ||
        !(p.out = hold(&held, args[9], 1, &room, 8)) ||
        !(p.ends = hold(&held, args[10], 1, &marks, 1)))
        return release(&held, NULL);
    p.paired = room == 2 * p.count;
    if (rows != ring.slots * ring.num_envs || p.count != places ||
        envs != ring.num_envs || !(p.paired || room == p.count) ||
        marks != p.kinds * p.count)
        return refuse(&held, MISFIT);
    if (rows_of_all(&p, &ring) < 0)
        return refuse(&held, STRAY);
    flags_of_all(&p);
    return release(&held, Py_NewRef(Py_None));
}

static PyObject *
unplace(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "unplace"};
    Ring ring;
    Py_ssize_t count, envs, room, places;
    (void)module;
    if (expect(held.name, given, 7) < 0 || read_ring(args + 2, &ring) < 0)
        return NULL;
    const int64_t *rows, *stops;
    int64_t *env_ids, *positions;
    if (!(rows = hold(&held, args[0], 0, &count, 8)) ||
        !(stops = hold(&held, args[1], 0, &envs, 8)) ||
        !(env_ids = hold(&held, args[5], 1, &room, 8)) ||
        !(positions = hold(&held, args[6], 1, &places, 8)))
        return release(&held, NULL);
    if (envs != ring.num_envs || count != room || count != places)
        return refuse(&held, "expected a stop of each environment, and room for all");
    int alone = ring.num_envs == 1, time_major = ring.of_slot > 1;
    /* Divisions take longer than all else here: one environment needs one in all. */
    int64_t newest = stops[0] - 1, last = newest % ring.slots;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row = rows[i], slot = row, env_id = 0;
        if (row < 0 || row >= ring.slots * ring.num_envs)
            return refuse(&held, "expected rows of the ring");
        if (!alone) {
            env_id = time_major ? row % ring.of_slot : row / ring.slots;
            slot = time_major ? row / ring.of_slot : row - env_id * ring.slots;
            newest = stops[env_id] - 1;
            last = newest % ring.slots;
        }
        int64_t age = last - slot;
        env_ids[i] = env_id;
        positions[i] = newest - (age < 0 ? age + ring.slots : age);
    }
    return release(&held, Py_NewRef(Py_None));
}

/* ---- module ------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"shares", (PyCFunction)(void (*)(void))shares, METH_FASTCALL, NULL},
    {"pick", (PyCFunction)(void (*)(void))pick, METH_FASTCALL, NULL},
    {"legal", (PyCFunction)(void (*)(void))legal, METH_FASTCALL, NULL},
    {"place", (PyCFunction)(void (*)(void))place, METH_FASTCALL, NULL},
    {"unplace", (PyCFunction)(void (*)(void))unplace, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "mmreplay.kernels._steps", NULL, 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__steps(void)
{
    return PyModuleDef_Init(&module);
}
