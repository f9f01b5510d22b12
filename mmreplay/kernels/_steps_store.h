/* A number for each of some steps, stored by row; steps.py says what `store` does. */

typedef struct {
    const int64_t *env_ids, *positions, *firsts, *stops;
    const float *numbers;
    int64_t *rows;
    Py_ssize_t count;
} Storing;

/* Finds the rows of all steps; 0 if a step is not alive or its number is not valid. */
static int
proper(const Storing *s, const Ring *ring, const float *column)
{
    for (Py_ssize_t i = 0; i < s->count; i++) {
        int64_t env_id = s->env_ids[i], position = s->positions[i], following;
        if (outside(ring, env_id, position) || position < s->firsts[env_id] ||
            position >= s->stops[env_id])
            return 0;
        /* NaN is in no order: it fails both. */
        if (!(s->numbers[i] >= 0 && s->numbers[i] <= FLT_MAX))
            return 0;
        rows_of(ring, env_id, position, &s->rows[i], &following);
        FETCH(column + s->rows[i]);
    }
    return 1;
}

static PyObject *
store(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "store"};
    Storing s;
    Ring ring;
    Py_ssize_t all, envs, same, counts[3];
    (void)module;
    if (expect(buffers.name, nargs, 10) < 0 || read_ring(args + 6, &ring) < 0)
        return NULL;
    float *column;
    if (!(column = acquire(&buffers, args[0], 1, &all, 4)) ||
        !(s.env_ids = acquire(&buffers, args[1], 0, &s.count, 8)) ||
        !(s.positions = acquire(&buffers, args[2], 0, &counts[0], 8)) ||
        !(s.numbers = acquire(&buffers, args[3], 0, &counts[1], 4)) ||
        !(s.firsts = acquire(&buffers, args[4], 0, &envs, 8)) ||
        !(s.stops = acquire(&buffers, args[5], 0, &same, 8)) ||
        !(s.rows = acquire(&buffers, args[9], 1, &counts[2], 8)))
        return release(&buffers, NULL);
    if (all != ring.slots * ring.num_envs || envs != ring.num_envs || same != envs ||
        counts[0] != s.count || counts[1] != s.count || counts[2] != s.count)
        return refuse(&buffers, "each row and each step must have a number");
    int valid = proper(&s, &ring, column);
    for (Py_ssize_t i = 0; valid && i < s.count; i++)
        column[s.rows[i]] = s.numbers[i];
    return release(&buffers, PyBool_FromLong(valid));
}
