/* Steps: drawn, judged and placed. steps.py is the twin of each, and says what it
 * does; both give the same bytes and refuse the same things. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <stdint.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "the twins in steps.py serve where no product of 128 bits is"
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

static PyObject *
pick(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "pick"};
    Philox random;
    Stretches stretches;
    Py_ssize_t count, places;
    (void)module;
    if (expect(held.name, given, 6) < 0 || read_philox(args, &random) < 0 ||
        read_stretches(&held, args + 2, &stretches) < 0)
        return release(&held, NULL);
    int64_t *env_ids, *positions;
    if (!(env_ids = hold(&held, args[4], 1, &count, 8)) ||
        !(positions = hold(&held, args[5], 1, &places, 8)))
        return release(&held, NULL);
    if (count != places)
        return refuse(&held, "expected room for as many environments as positions");
    pick_some(&random, &stretches, count, env_ids, positions);
    return release(&held, Py_NewRef(Py_None));
}

typedef struct {
    const uint8_t *flags, *law;
    const int64_t *heads;
    int64_t after;
    Ring ring;
} Judge;

#define STRAY "expected known environments and positions of at least 0"
#define MISFIT "expected flags of every row, and arrays of one length"

/* Flags, slots, environments, time_major, law, heads and after. */
static int
read_judge(Held *held, PyObject *const *args, Judge *judge)
{
    Py_ssize_t rows, verdicts, envs;
    if (read_ring(args + 1, &judge->ring) < 0)
        return -1;
    judge->after = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || !(judge->flags = hold(held, args[0], 0, &rows, 1)) ||
        !(judge->law = hold(held, args[4], 0, &verdicts, 1)) ||
        !(judge->heads = hold(held, args[5], 0, &envs, 8)))
        return -1;
    int64_t most = judge->ring.slots - (judge->ring.slots > 1);
    if (rows == judge->ring.slots * judge->ring.num_envs &&
        envs == judge->ring.num_envs && judge->after >= 0 && judge->after <= most &&
        verdicts == (ALL_FLAGS + 1) * (ALL_FLAGS + 1))
        return 0;
    refuse(held, MISFIT);
    return -1;
}

/* Judges up to GROUP steps; their flags are on their way before the first is read. */
static int
judge_some(const Judge *judge, const int64_t *env_ids, const int64_t *positions,
           Py_ssize_t count, uint8_t *out)
{
    /* A copy: what is written may be anywhere, the original included. */
    const Judge j = *judge;
    int64_t slots[GROUP];
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row, following;
        if (outside(&j.ring, env_ids[i], positions[i]))
            return -1;
        rows_of(&j.ring, env_ids[i], positions[i], &row, &following);
        FETCH(j.flags + row);
        FETCH(j.flags + following);
        slots[i] = slot_of(&j.ring, positions[i]);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t slot = slots[i], base = env_ids[i] * j.ring.of_env;
        int64_t left = j.heads[env_ids[i]] - positions[i];
        unsigned here = j.flags[base + slot * j.ring.of_slot] & ALL_FLAGS;
        int good = !(here & FINAL);
        for (int64_t step = 1; good && step <= j.after; step++) {
            slot = slot + 1 == j.ring.slots ? 0 : slot + 1;
            int there = step < left;
            unsigned then = there ? j.flags[base + slot * j.ring.of_slot] : 0;
            then &= ALL_FLAGS;
            good = j.law[here << 6 | then];
            if (!there || (then & START))
                break;
            here = then;
        }
        out[i] = (uint8_t)good;
    }
    return 0;
}

static PyObject *
legal(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "legal"};
    Judge judge;
    Py_ssize_t count, places, room;
    (void)module;
    if (expect(held.name, given, 10) < 0 || read_judge(&held, args, &judge) < 0)
        return release(&held, NULL);
    const int64_t *env_ids, *positions;
    uint8_t *out;
    if (!(env_ids = hold(&held, args[7], 0, &count, 8)) ||
        !(positions = hold(&held, args[8], 0, &places, 8)) ||
        !(out = hold(&held, args[9], 1, &room, 1)))
        return release(&held, NULL);
    if (count != places || count != room)
        return refuse(&held, MISFIT);
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        Py_ssize_t some = count - first < GROUP ? count - first : GROUP;
        if (judge_some(&judge, env_ids + first, positions + first, some, out + first) < 0)
            return refuse(&held, STRAY);
    }
    return release(&held, Py_NewRef(Py_None));
}

static PyObject *
pick_legal(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "pick_legal"};
    Philox random;
    Judge judge;
    Stretches stretches;
    Py_ssize_t count, places, found = 0;
    (void)module;
    if (expect(held.name, given, 14) < 0 || read_philox(args, &random) < 0 ||
        read_judge(&held, args + 4, &judge) < 0 ||
        read_stretches(&held, args + 2, &stretches) < 0)
        return release(&held, NULL);
    int64_t tries = PyLong_AsLongLong(args[11]), *env_ids, *positions;
    if (PyErr_Occurred() || !(env_ids = hold(&held, args[12], 1, &count, 8)) ||
        !(positions = hold(&held, args[13], 1, &places, 8)))
        return release(&held, NULL);
    if (count != places)
        return refuse(&held, MISFIT);
    while (tries > 0 && found < count) {
        int64_t some_ids[GROUP], some[GROUP];
        uint8_t good[GROUP];
        Py_ssize_t most = tries < GROUP ? (Py_ssize_t)tries : GROUP;
        pick_some(&random, &stretches, most, some_ids, some);
        if (judge_some(&judge, some_ids, some, most, good) < 0)
            return refuse(&held, STRAY);
        for (Py_ssize_t i = 0; i < most && found < count; i++)
            if (good[i]) {
                env_ids[found] = some_ids[i];
                positions[found++] = some[i];
            }
        tries -= most;
    }
    return release(&held, PyLong_FromSsize_t(found));
}

typedef struct {
    const uint8_t *flags, *bits;
    const int64_t *env_ids, *positions, *heads;
    int64_t *out;
    uint8_t *ends;
    /* Steps, kinds of ends, and from a step's end of one kind to that of the next. */
    Py_ssize_t count, kinds, apart;
    int paired, bare;
} Placing;

/* Rows of all steps and of those after, and their flags on the way to the caches. */
static int
rows_of_all(const Placing *placing, const Ring *where)
{
    /* Copies: what is written may be anywhere, the originals included. */
    const Placing p = *placing;
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
flags_of_all(const Placing *placing)
{
    const Placing p = *placing;
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
        if ((p.flags[rows[0]] & TERMINATED) &&
            !((p.flags[rows[1]] & FINAL) && p.positions[i] + 1 < p.heads[p.env_ids[i]]))
            rows[1] = rows[0];
    }
}

/* Flags, environments, positions and heads; bits, bare and ends. */
static int
read_placing(Held *held, PyObject *const *args, PyObject *bits, PyObject *bare,
             PyObject *ends, const Ring *ring, Placing *p)
{
    Py_ssize_t rows, places, envs, marks;
    if ((p->bare = PyObject_IsTrue(bare)) < 0 ||
        !(p->flags = hold(held, args[0], 0, &rows, 1)) ||
        !(p->env_ids = hold(held, args[1], 0, &p->count, 8)) ||
        !(p->positions = hold(held, args[2], 0, &places, 8)) ||
        !(p->heads = hold(held, args[3], 0, &envs, 8)) ||
        !(p->bits = hold(held, bits, 0, &p->kinds, 1)) ||
        !(p->ends = hold(held, ends, 1, &marks, 1)))
        return -1;
    if (rows == ring->slots * ring->num_envs && p->count == places &&
        envs == ring->num_envs && marks == p->kinds * p->count) {
        p->apart = p->count;
        return 0;
    }
    refuse(held, MISFIT);
    return -1;
}

static PyObject *
locate_rows(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "locate_rows"};
    Placing p;
    Ring ring;
    Py_ssize_t room;
    (void)module;
    if (expect(held.name, given, 11) < 0 || read_ring(args + 4, &ring) < 0)
        return NULL;
    if (read_placing(&held, args, args[7], args[8], args[10], &ring, &p) < 0 ||
        !(p.out = hold(&held, args[9], 1, &room, 8)))
        return release(&held, NULL);
    p.paired = room == 2 * p.count;
    if (!p.paired && room != p.count)
        return refuse(&held, MISFIT);
    if (rows_of_all(&p, &ring) < 0)
        return refuse(&held, STRAY);
    flags_of_all(&p);
    return release(&held, Py_NewRef(Py_None));
}

static PyObject *
locate_positions(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "locate_positions"};
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

#include "_steps_store.h"
#include "_steps_take.h"
#include "_steps_split.h"
#include "_steps_fold.h"
#include "_steps_goals.h"

/* ---- module ------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"shares", (PyCFunction)(void (*)(void))shares, METH_FASTCALL, NULL},
    {"pick", (PyCFunction)(void (*)(void))pick, METH_FASTCALL, NULL},
    {"pick_legal", (PyCFunction)(void (*)(void))pick_legal, METH_FASTCALL, NULL},
    {"legal", (PyCFunction)(void (*)(void))legal, METH_FASTCALL, NULL},
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
