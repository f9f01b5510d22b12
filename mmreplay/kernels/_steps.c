/* Steps: drawn, checked for legality and located. steps.py is the twin of each function
 * and says what it does; both write the same bytes and refuse the same arguments. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <stdint.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "the twins in steps.py serve where the compiler has no 128-bit integers"
#endif

#define FETCH(address) __builtin_prefetch(address)

enum { START = 1, TERMINATED = 2, TRUNCATED = 4, FINAL = 8, CUT = 32, ALL_FLAGS = 63 };
enum { MAX_ARRAYS = 16 };
/* Rows looked up before the first of their flags is read. */
enum { GROUP = 64 };
/* Batches this long are worth letting other threads run. */
enum { LONG_BATCH = 1024 };

#include "_buffers.h"
#include "_steps_args.h"
#include "_steps_random.h"

/* ---- functions --------------------------------------------------------------- */

static PyObject *
shares(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "shares"};
    Philox random;
    Py_ssize_t count;
    (void)module;
    if (expect(buffers.name, nargs, 3) < 0 || read_philox(args, &random) < 0)
        return NULL;
    double *out = acquire(&buffers, args[2], 1, &count, 8);
    if (out == NULL)
        return release(&buffers, NULL);
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = share(&random);
    return release(&buffers, Py_NewRef(Py_None));
}

static PyObject *
pick(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "pick"};
    Philox random;
    Spans spans;
    Py_ssize_t count, num_positions;
    (void)module;
    if (expect(buffers.name, nargs, 6) < 0 || read_philox(args, &random) < 0 ||
        read_spans(&buffers, args + 2, &spans) < 0)
        return release(&buffers, NULL);
    int64_t *env_ids, *positions;
    if (!(env_ids = acquire(&buffers, args[4], 1, &count, 8)) ||
        !(positions = acquire(&buffers, args[5], 1, &num_positions, 8)))
        return release(&buffers, NULL);
    if (count != num_positions)
        return refuse(&buffers, "env_ids and positions must have one length");
    pick_some(&random, &spans, count, env_ids, positions);
    return release(&buffers, Py_NewRef(Py_None));
}

typedef struct {
    const uint8_t *flags, *verdicts;
    const int64_t *heads;
    int64_t after;
    Ring ring;
} StartTable;

#define STRAY "environments must be known, and positions at least 0"
#define MISFIT "flags must have every row, and arrays one length"

/* Flags, slots, environments, time_major, verdicts, heads and after. */
static int
read_start_table(Buffers *buffers, PyObject *const *args, StartTable *table)
{
    Py_ssize_t rows, num_verdicts, envs;
    if (read_ring(args + 1, &table->ring) < 0)
        return -1;
    table->after = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || !(table->flags = acquire(buffers, args[0], 0, &rows, 1)) ||
        !(table->verdicts = acquire(buffers, args[4], 0, &num_verdicts, 1)) ||
        !(table->heads = acquire(buffers, args[5], 0, &envs, 8)))
        return -1;
    int64_t max_after = table->ring.slots - (table->ring.slots > 1);
    if (rows == table->ring.slots * table->ring.num_envs &&
        envs == table->ring.num_envs && table->after >= 0 && table->after <= max_after &&
        num_verdicts == (ALL_FLAGS + 1) * (ALL_FLAGS + 1))
        return 0;
    refuse(buffers, MISFIT);
    return -1;
}

/* Checks up to GROUP steps; the flags of all are prefetched before the first is read. */
static int
check_some(const StartTable *table, const int64_t *env_ids, const int64_t *positions,
           Py_ssize_t count, uint8_t *out)
{
    /* A copy: what is written may be anywhere, the original included. */
    const StartTable t = *table;
    int64_t slots[GROUP];
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row, following;
        if (outside(&t.ring, env_ids[i], positions[i]))
            return -1;
        rows_of(&t.ring, env_ids[i], positions[i], &row, &following);
        FETCH(t.flags + row);
        FETCH(t.flags + following);
        slots[i] = slot_of(&t.ring, positions[i]);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t slot = slots[i], base = env_ids[i] * t.ring.of_env;
        int64_t left = t.heads[env_ids[i]] - positions[i];
        unsigned here = t.flags[base + slot * t.ring.of_slot] & ALL_FLAGS;
        int good = !(here & FINAL);
        for (int64_t step = 1; good && step <= t.after; step++) {
            slot = slot + 1 == t.ring.slots ? 0 : slot + 1;
            int there = step < left;
            unsigned next = there ? t.flags[base + slot * t.ring.of_slot] : 0;
            next &= ALL_FLAGS;
            good = t.verdicts[here << 6 | next];
            if (!there || (next & START))
                break;
            here = next;
        }
        out[i] = (uint8_t)good;
    }
    return 0;
}

static PyObject *
legal(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "legal"};
    StartTable table;
    Py_ssize_t count, num_positions, out_count;
    (void)module;
    if (expect(buffers.name, nargs, 10) < 0 ||
        read_start_table(&buffers, args, &table) < 0)
        return release(&buffers, NULL);
    const int64_t *env_ids, *positions;
    uint8_t *out;
    if (!(env_ids = acquire(&buffers, args[7], 0, &count, 8)) ||
        !(positions = acquire(&buffers, args[8], 0, &num_positions, 8)) ||
        !(out = acquire(&buffers, args[9], 1, &out_count, 1)))
        return release(&buffers, NULL);
    if (count != num_positions || count != out_count)
        return refuse(&buffers, MISFIT);
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        Py_ssize_t some = count - first < GROUP ? count - first : GROUP;
        if (check_some(&table, env_ids + first, positions + first, some, out + first) < 0)
            return refuse(&buffers, STRAY);
    }
    return release(&buffers, Py_NewRef(Py_None));
}

static PyObject *
all_legal(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "all_legal"};
    StartTable table;
    Py_ssize_t count, num_positions, num_firsts, num_stops;
    (void)module;
    if (expect(buffers.name, nargs, 11) < 0 ||
        read_start_table(&buffers, args, &table) < 0)
        return release(&buffers, NULL);
    const int64_t *firsts, *stops, *env_ids, *positions;
    if (!(firsts = acquire(&buffers, args[7], 0, &num_firsts, 8)) ||
        !(stops = acquire(&buffers, args[8], 0, &num_stops, 8)) ||
        !(env_ids = acquire(&buffers, args[9], 0, &count, 8)) ||
        !(positions = acquire(&buffers, args[10], 0, &num_positions, 8)))
        return release(&buffers, NULL);
    if (count != num_positions || num_firsts != table.ring.num_envs ||
        num_stops != table.ring.num_envs)
        return refuse(&buffers, MISFIT);
    uint8_t good[GROUP];
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        Py_ssize_t some = count - first < GROUP ? count - first : GROUP;
        for (Py_ssize_t i = first; i < first + some; i++) {
            int64_t env_id = env_ids[i], position = positions[i];
            if (outside(&table.ring, env_id, position) || position < firsts[env_id] ||
                position >= stops[env_id])
                return release(&buffers, Py_NewRef(Py_False));
        }
        check_some(&table, env_ids + first, positions + first, some, good);
        for (Py_ssize_t i = 0; i < some; i++)
            if (!good[i])
                return release(&buffers, Py_NewRef(Py_False));
    }
    return release(&buffers, Py_NewRef(Py_True));
}

static PyObject *
pick_legal(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "pick_legal"};
    Philox random;
    StartTable table;
    Spans spans;
    Py_ssize_t count, num_positions, num_found = 0;
    (void)module;
    if (expect(buffers.name, nargs, 14) < 0 || read_philox(args, &random) < 0 ||
        read_start_table(&buffers, args + 4, &table) < 0 ||
        read_spans(&buffers, args + 2, &spans) < 0)
        return release(&buffers, NULL);
    int64_t tries = PyLong_AsLongLong(args[11]), *env_ids, *positions;
    if (PyErr_Occurred() || !(env_ids = acquire(&buffers, args[12], 1, &count, 8)) ||
        !(positions = acquire(&buffers, args[13], 1, &num_positions, 8)))
        return release(&buffers, NULL);
    if (count != num_positions)
        return refuse(&buffers, MISFIT);
    while (tries > 0 && num_found < count) {
        int64_t some_ids[GROUP], some[GROUP];
        uint8_t good[GROUP];
        Py_ssize_t num_tries = tries < GROUP ? (Py_ssize_t)tries : GROUP;
        pick_some(&random, &spans, num_tries, some_ids, some);
        if (check_some(&table, some_ids, some, num_tries, good) < 0)
            return refuse(&buffers, STRAY);
        for (Py_ssize_t i = 0; i < num_tries && num_found < count; i++)
            if (good[i]) {
                env_ids[num_found] = some_ids[i];
                positions[num_found++] = some[i];
            }
        tries -= num_tries;
    }
    return release(&buffers, PyLong_FromSsize_t(num_found));
}

typedef struct {
    const uint8_t *flags, *bits;
    const int64_t *env_ids, *positions, *heads;
    int64_t *out;
    uint8_t *ends;
    /* Steps, kinds of ends, and from a step's end of one kind to that of the next. */
    Py_ssize_t count, kinds, apart;
    int paired, bare;
} RowLookup;

/* Finds the rows of all steps and of those after them, and prefetches their flags. */
static int
rows_of_all(const RowLookup *lookup, const Ring *where)
{
    /* Copies: what is written may be anywhere, the originals included. */
    const RowLookup p = *lookup;
    const Ring ring = *where;
    for (Py_ssize_t i = 0; i < p.count; i++) {
        int64_t row, following;
        if (outside(&ring, p.env_ids[i], p.positions[i]))
            return -1;
        rows_of(&ring, p.env_ids[i], p.positions[i], &row, &following);
        FETCH(p.flags + row);
        if (p.paired) {
            FETCH(p.flags + following);
            p.out[2 * i] = row;
            p.out[2 * i + 1] = following;
        }
        else
            p.out[i] = row;
    }
    return 0;
}

static void
flags_of_all(const RowLookup *lookup)
{
    const RowLookup p = *lookup;
    int width = p.paired ? 2 : 1;
    for (Py_ssize_t kind = 0; kind < p.kinds; kind++) {
        uint8_t bit = p.bits[kind], *ends = p.ends + kind * p.apart;
        for (Py_ssize_t i = 0; i < p.count; i++)
            ends[i] = (p.flags[p.out[width * i]] & bit) != 0;
    }
    if (!p.paired || !p.bare)
        return;
    for (Py_ssize_t i = 0; i < p.count; i++) {
        int64_t *rows = p.out + 2 * i;
        if (p.positions[i] + 1 >= p.heads[p.env_ids[i]] || (p.flags[rows[1]] & START))
            rows[1] = rows[0];
    }
}

/* Flags, environments, positions and heads; bits, bare and ends. */
static int
read_lookup(Buffers *buffers, PyObject *const *args, PyObject *bits, PyObject *bare,
            PyObject *ends, const Ring *ring, RowLookup *p)
{
    Py_ssize_t rows, num_positions, envs, marks;
    if ((p->bare = PyObject_IsTrue(bare)) < 0 ||
        !(p->flags = acquire(buffers, args[0], 0, &rows, 1)) ||
        !(p->env_ids = acquire(buffers, args[1], 0, &p->count, 8)) ||
        !(p->positions = acquire(buffers, args[2], 0, &num_positions, 8)) ||
        !(p->heads = acquire(buffers, args[3], 0, &envs, 8)) ||
        !(p->bits = acquire(buffers, bits, 0, &p->kinds, 1)) ||
        !(p->ends = acquire(buffers, ends, 1, &marks, 1)))
        return -1;
    if (rows == ring->slots * ring->num_envs && p->count == num_positions &&
        envs == ring->num_envs && marks == p->kinds * p->count) {
        p->apart = p->count;
        return 0;
    }
    refuse(buffers, MISFIT);
    return -1;
}

static PyObject *
locate_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "locate_rows"};
    RowLookup p;
    Ring ring;
    Py_ssize_t out_count;
    (void)module;
    if (expect(buffers.name, nargs, 11) < 0 || read_ring(args + 4, &ring) < 0)
        return NULL;
    if (read_lookup(&buffers, args, args[7], args[8], args[10], &ring, &p) < 0 ||
        !(p.out = acquire(&buffers, args[9], 1, &out_count, 8)))
        return release(&buffers, NULL);
    p.paired = out_count == 2 * p.count;
    if (!p.paired && out_count != p.count)
        return refuse(&buffers, MISFIT);
    if (rows_of_all(&p, &ring) < 0)
        return refuse(&buffers, STRAY);
    flags_of_all(&p);
    return release(&buffers, Py_NewRef(Py_None));
}

static PyObject *
locate_positions(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "locate_positions"};
    Ring ring;
    Py_ssize_t count, envs, out_count, num_positions;
    (void)module;
    if (expect(buffers.name, nargs, 7) < 0 || read_ring(args + 2, &ring) < 0)
        return NULL;
    const int64_t *rows, *stops;
    int64_t *env_ids, *positions;
    if (!(rows = acquire(&buffers, args[0], 0, &count, 8)) ||
        !(stops = acquire(&buffers, args[1], 0, &envs, 8)) ||
        !(env_ids = acquire(&buffers, args[5], 1, &out_count, 8)) ||
        !(positions = acquire(&buffers, args[6], 1, &num_positions, 8)))
        return release(&buffers, NULL);
    if (envs != ring.num_envs || count != out_count || count != num_positions)
        return refuse(&buffers, "stops must have each environment, and outputs one "
                      "length");
    int alone = ring.num_envs == 1, time_major = ring.of_slot > 1;
    /* Divisions take longer than all else here: one environment needs one in all. */
    int64_t newest = stops[0] - 1, last = newest % ring.slots;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row = rows[i], slot = row, env_id = 0;
        if (row < 0 || row >= ring.slots * ring.num_envs)
            return refuse(&buffers, "rows must be in the ring");
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
    return release(&buffers, Py_NewRef(Py_None));
}

#include "_steps_store.h"
#include "_steps_take.h"
#include "_steps_split.h"
#include "_steps_fold.h"
#include "_steps_goals.h"
#include "_steps_divide.h"

/* ---- module ------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"shares", (PyCFunction)(void (*)(void))shares, METH_FASTCALL, NULL},
    {"pick", (PyCFunction)(void (*)(void))pick, METH_FASTCALL, NULL},
    {"pick_legal", (PyCFunction)(void (*)(void))pick_legal, METH_FASTCALL, NULL},
    {"legal", (PyCFunction)(void (*)(void))legal, METH_FASTCALL, NULL},
    {"all_legal", (PyCFunction)(void (*)(void))all_legal, METH_FASTCALL, NULL},
    {"divide", (PyCFunction)(void (*)(void))divide, METH_FASTCALL, NULL},
    {"locate_rows", (PyCFunction)(void (*)(void))locate_rows, METH_FASTCALL, NULL},
    {"store", (PyCFunction)(void (*)(void))store, METH_FASTCALL, NULL},
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, NULL},
    {"split", (PyCFunction)(void (*)(void))split, METH_FASTCALL, NULL},
    {"locate_positions", (PyCFunction)(void (*)(void))locate_positions, METH_FASTCALL, NULL},
    {"fold_steps", (PyCFunction)(void (*)(void))fold_steps, METH_FASTCALL, NULL},
    {"fold_fields", (PyCFunction)(void (*)(void))fold_fields, METH_FASTCALL, NULL},
    {"columns", (PyCFunction)(void (*)(void))columns, METH_FASTCALL, NULL},
    {"weighted_sums", (PyCFunction)(void (*)(void))weighted_sums, METH_FASTCALL, NULL},
    {"discounts", (PyCFunction)(void (*)(void))discounts, METH_FASTCALL, NULL},
    {"take_fields", (PyCFunction)(void (*)(void))take_fields, METH_FASTCALL, NULL},
    {"locate", (PyCFunction)(void (*)(void))locate, METH_FASTCALL, NULL},
    {"known", (PyCFunction)(void (*)(void))known, METH_FASTCALL, NULL},
    {"hindsight", (PyCFunction)(void (*)(void))hindsight, METH_FASTCALL, NULL},
    {"replace", (PyCFunction)(void (*)(void))replace, METH_FASTCALL, NULL},
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
