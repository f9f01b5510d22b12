/* Random numbers, and rows of spans drawn by them. */

typedef struct {
    uint64_t key, stream, block, step, values[4];
    int used;
} Philox;

static inline uint64_t
product(uint64_t a, uint64_t b, uint64_t *high)
{
    unsigned __int128 wide = (unsigned __int128)a * b;
    *high = (uint64_t)(wide >> 64);
    return (uint64_t)wide;
}

/* Philox4x64-10, counter [block, step, 0, 0], key [seed, stream]. */
static void
refill(Philox *p)
{
    uint64_t c0 = ++p->block, c1 = p->step, c2 = 0, c3 = 0, k0 = p->key, k1 = p->stream;
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

/* The first of growing ends above a rank. */
static inline Py_ssize_t
span_of(const int64_t *ends, Py_ssize_t count, int64_t rank)
{
    Py_ssize_t low = 0;
    while (count > 1) {
        Py_ssize_t half = count / 2;
        low += ends[low + half - 1] <= rank ? half : 0;
        count -= half;
    }
    return low;
}

typedef struct {
    const int64_t *ends, *stops;
    Py_ssize_t count;
} Spans;

static int
read_spans(Buffers *buffers, PyObject *const *args, Spans *spans)
{
    Py_ssize_t same;
    if (!(spans->ends = acquire(buffers, args[0], 0, &spans->count, 8)) ||
        !(spans->stops = acquire(buffers, args[1], 0, &same, 8)))
        return -1;
    if (spans->count == same && same > 0 && spans->ends[same - 1] > 0)
        return 0;
    refuse(buffers, "each environment must have an end and a stop, and one a row");
    return -1;
}

static void
pick_some(Philox *random, const Spans *spans, Py_ssize_t count,
          int64_t *env_ids, int64_t *positions)
{
    const int64_t *ends = spans->ends;
    double total = (double)ends[spans->count - 1];
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t rank = (int64_t)(share(random) * total);
        Py_ssize_t env_id = span_of(ends, spans->count, rank);
        env_ids[i] = env_id;
        positions[i] = spans->stops[env_id] - (ends[env_id] - rank);
    }
}
