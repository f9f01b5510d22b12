/* Arguments of functions of _steps.c that are no arrays, and the ring. */

static int
expect(const char *name, Py_ssize_t nargs, Py_ssize_t wanted)
{
    if (nargs == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted,
                 nargs);
    return -1;
}

typedef struct {
    int64_t slots, num_envs, of_env, of_slot;
    uint64_t inverse;
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
        PyErr_SetString(PyExc_ValueError, "slots and num_envs must be at least 1");
        return -1;
    }
    ring->inverse = UINT64_MAX / (uint64_t)ring->slots;
    ring->of_env = time_major ? 1 : ring->slots;
    ring->of_slot = time_major ? ring->num_envs : 1;
    return 0;
}

/* Whether records of this many bytes are there, one for every row. */
static int
fits_records(const Ring *ring, Py_ssize_t nbytes, Py_ssize_t stride)
{
    Py_ssize_t rows = ring->slots * ring->num_envs;
    return stride >= 1 && stride <= PY_SSIZE_T_MAX / rows && nbytes == stride * rows;
}

static inline int
outside(const Ring *ring, int64_t env_id, int64_t position)
{
    return env_id < 0 || env_id >= ring->num_envs || position < 0 ||
           position == INT64_MAX;
}

/* position % slots, without the division: it is most of what locating a step costs.
 * The inverse is short of 2^64 / slots by 1 at most, so that a position, being less
 * than 2^63, is found in its lap or in the one before. */
static inline int64_t
slot_of(const Ring *ring, int64_t position)
{
    uint64_t lap = (uint64_t)(((unsigned __int128)position * ring->inverse) >> 64);
    int64_t slot = position - (int64_t)lap * ring->slots;
    return slot < ring->slots ? slot : slot - ring->slots;
}

/* Rows of a position and of the one after it. */
static inline void
rows_of(const Ring *ring, int64_t env_id, int64_t position, int64_t *row,
        int64_t *following)
{
    int64_t slot = slot_of(ring, position), base = env_id * ring->of_env;
    int64_t next = slot + 1 == ring->slots ? 0 : slot + 1;
    *row = base + slot * ring->of_slot;
    *following = base + next * ring->of_slot;
}
