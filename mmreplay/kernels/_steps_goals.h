/* Episodes of steps, and the steps whose goals they get; steps.py says what `locate`,
 * `known` and `hindsight` do. */

static PyObject *
locate(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "locate"};
    Py_ssize_t numbers, envs[5], count, same[3];
    (void)module;
    if (expect(buffers.name, nargs, 10) < 0)
        return NULL;
    const int64_t *starts, *firsts, *stops, *alive, *seen, *env_ids, *positions;
    const uint8_t *newest;
    int64_t *begin, *end;
    if (!(starts = acquire(&buffers, args[0], 0, &numbers, 8)) ||
        !(firsts = acquire(&buffers, args[1], 0, &envs[0], 8)) ||
        !(stops = acquire(&buffers, args[2], 0, &envs[1], 8)) ||
        !(alive = acquire(&buffers, args[3], 0, &envs[2], 8)) ||
        !(seen = acquire(&buffers, args[4], 0, &envs[3], 8)) ||
        !(newest = acquire(&buffers, args[5], 0, &envs[4], 1)) ||
        !(env_ids = acquire(&buffers, args[6], 0, &count, 8)) ||
        !(positions = acquire(&buffers, args[7], 0, &same[0], 8)) ||
        !(begin = acquire(&buffers, args[8], 1, &same[1], 8)) ||
        !(end = acquire(&buffers, args[9], 1, &same[2], 8)))
        return release(&buffers, NULL);
    if (numbers % 2 || envs[1] != envs[0] || envs[2] != envs[0] ||
        envs[3] != envs[0] || envs[4] != envs[0] || same[0] != count ||
        same[1] != count || same[2] != count)
        return refuse(&buffers, "queues must have each environment, and outputs one "
                      "length");
    const int64_t *closed = starts + numbers / 2;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t env_id = env_ids[i];
        if (env_id < 0 || env_id >= envs[0])
            return refuse(&buffers, STRAY);
        int64_t low = firsts[env_id], stop = stops[env_id], first = low;
        if (low < 0 || low > stop || stop > numbers / 2)
            return refuse(&buffers, "queues must be within their array");
        int64_t left = stop - low;
        while (left > 1) {
            int64_t half = left / 2;
            low += starts[low + half - 1] <= positions[i] ? half : 0;
            left -= half;
        }
        low += left == 1 && starts[low] <= positions[i];
        begin[i] = low > first ? starts[low - 1] : alive[env_id];
        int final_row = (newest[env_id] & FINAL) != 0;
        end[i] = low == stop ? seen[env_id] - final_row : closed[low];
    }
    return release(&buffers, Py_NewRef(Py_None));
}

static PyObject *
known(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "known"};
    Ring ring;
    Py_ssize_t rows, envs, count, num_ends;
    (void)module;
    if (expect(buffers.name, nargs, 7) < 0 || read_ring(args + 1, &ring) < 0)
        return NULL;
    const uint8_t *flags;
    const int64_t *heads, *env_ids;
    int64_t *ends;
    if (!(flags = acquire(&buffers, args[0], 0, &rows, 1)) ||
        !(heads = acquire(&buffers, args[4], 0, &envs, 8)) ||
        !(env_ids = acquire(&buffers, args[5], 0, &count, 8)) ||
        !(ends = acquire(&buffers, args[6], 1, &num_ends, 8)))
        return release(&buffers, NULL);
    if (rows != ring.slots * ring.num_envs || envs != ring.num_envs || count != num_ends)
        return refuse(&buffers, MISFIT);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row, following;
        if (outside(&ring, env_ids[i], ends[i]))
            return refuse(&buffers, STRAY);
        rows_of(&ring, env_ids[i], ends[i], &row, &following);
        FETCH(flags + row);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row, following;
        rows_of(&ring, env_ids[i], ends[i], &row, &following);
        ends[i] -= ends[i] >= heads[env_ids[i]] || !(flags[row] & FINAL);
    }
    return release(&buffers, Py_NewRef(Py_None));
}

enum { FUTURE, FINAL_STEP, EPISODE_STEP };

/* The position in [first, stop) of a share in [0, 1], 1 being the last. */
static inline int64_t
position_between(int64_t first, int64_t stop, double share)
{
    int64_t length = stop > first ? stop - first : 1;
    int64_t steps = (int64_t)(share * (double)length);
    return first + (steps < length - 1 ? steps : length - 1);
}

static PyObject *
hindsight(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "hindsight"};
    Philox chances = {.used = 4};
    Py_ssize_t counts[7];
    (void)module;
    if (expect(buffers.name, nargs, 11) < 0)
        return NULL;
    chances.key = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred())
        return NULL;
    chances.stream = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    double ratio = PyFloat_AsDouble(args[2]);
    long kind = PyErr_Occurred() ? -1 : PyLong_AsLong(args[3]);
    const int64_t *begins, *stops, *starts, *lasts;
    uint8_t *chosen;
    int64_t *rows, *later;
    if (PyErr_Occurred() || !(begins = acquire(&buffers, args[4], 0, &counts[0], 8)) ||
        !(stops = acquire(&buffers, args[5], 0, &counts[1], 8)) ||
        !(starts = acquire(&buffers, args[6], 0, &counts[2], 8)) ||
        !(lasts = acquire(&buffers, args[7], 0, &counts[3], 8)) ||
        !(chosen = acquire(&buffers, args[8], 1, &counts[4], 1)) ||
        !(rows = acquire(&buffers, args[9], 1, &counts[5], 8)) ||
        !(later = acquire(&buffers, args[10], 1, &counts[6], 8)))
        return release(&buffers, NULL);
    Py_ssize_t count = counts[0];
    for (int at = 1; at < 7; at++)
        if (counts[at] != count)
            return refuse(&buffers, "arrays must have one length");
    for (Py_ssize_t i = 0; i < count; i++)
        if (begins[i] < 0 || starts[i] < 0 || stops[i] < 0)
            return refuse(&buffers, STRAY);
    for (Py_ssize_t i = 0; i < count; i++)
        chosen[i] = share(&chances) < ratio && lasts[i] < stops[i];
    for (Py_ssize_t i = 0; i < count; i++) {
        double share_within = share(&chances);
        int64_t first = kind == EPISODE_STEP ? begins[i] : starts[i];
        later[i] = position_between(starts[i], stops[i], share_within);
        double share_of = kind == FINAL_STEP ? 1.0 : share_within;
        rows[i] = chosen[i] ? position_between(first, stops[i], share_of) : starts[i];
        if (!chosen[i])
            later[i] = starts[i];
    }
    return release(&buffers, Py_NewRef(Py_None));
}

static PyObject *
replace(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "replace"};
    Py_ssize_t out_nbytes, count, nbytes;
    (void)module;
    if (expect(buffers.name, nargs, 4) < 0)
        return NULL;
    int64_t rows = PyLong_AsLongLong(args[1]);
    const int64_t *which;
    const char *values;
    char *out;
    if (PyErr_Occurred() || !(out = acquire(&buffers, args[0], 1, &out_nbytes, 1)) ||
        !(which = acquire(&buffers, args[2], 0, &count, 8)) ||
        !(values = acquire(&buffers, args[3], 0, &nbytes, 1)))
        return release(&buffers, NULL);
    if (rows < 0 || (rows ? out_nbytes % rows : out_nbytes) ||
        (count ? nbytes % count : nbytes))
        return refuse(&buffers, "arrays must hold whole rows");
    Py_ssize_t wide = rows ? out_nbytes / rows : 0;
    Py_ssize_t item_nbytes = count ? nbytes / count : 0;
    if (count && (item_nbytes ? wide % item_nbytes : wide))
        return refuse(&buffers, "arrays must hold whole rows");
    for (Py_ssize_t i = 0; i < count; i++)
        if (which[i] < 0 || which[i] >= rows)
            return refuse(&buffers, "rows must exist");
    for (Py_ssize_t i = 0; item_nbytes && i < count; i++)
        for (Py_ssize_t at = 0; at < wide; at += item_nbytes)
            copy_short(out + which[i] * wide + at, values + i * item_nbytes,
                       (size_t)item_nbytes);
    return release(&buffers, Py_NewRef(Py_None));
}
