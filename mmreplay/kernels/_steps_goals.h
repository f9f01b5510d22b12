/* Episodes of steps, and the steps whose goals they get; steps.py says what `locate`,
 * `known` and `hindsight` do. */

static PyObject *
locate(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "locate"};
    Py_ssize_t numbers, envs[5], count, same[3];
    (void)module;
    if (expect(held.name, given, 10) < 0)
        return NULL;
    const int64_t *starts, *firsts, *stops, *alive, *seen, *env_ids, *positions;
    const uint8_t *newest;
    int64_t *begin, *end;
    if (!(starts = hold(&held, args[0], 0, &numbers, 8)) ||
        !(firsts = hold(&held, args[1], 0, &envs[0], 8)) ||
        !(stops = hold(&held, args[2], 0, &envs[1], 8)) ||
        !(alive = hold(&held, args[3], 0, &envs[2], 8)) ||
        !(seen = hold(&held, args[4], 0, &envs[3], 8)) ||
        !(newest = hold(&held, args[5], 0, &envs[4], 1)) ||
        !(env_ids = hold(&held, args[6], 0, &count, 8)) ||
        !(positions = hold(&held, args[7], 0, &same[0], 8)) ||
        !(begin = hold(&held, args[8], 1, &same[1], 8)) ||
        !(end = hold(&held, args[9], 1, &same[2], 8)))
        return release(&held, NULL);
    if (numbers % 2 || envs[1] != envs[0] || envs[2] != envs[0] ||
        envs[3] != envs[0] || envs[4] != envs[0] || same[0] != count || same[1] != count || same[2] != count)
        return refuse(&held, "expected queues of each environment, and room for all");
    const int64_t *closed = starts + numbers / 2;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t env_id = env_ids[i];
        if (env_id < 0 || env_id >= envs[0])
            return refuse(&held, STRAY);
        int64_t low = firsts[env_id], stop = stops[env_id], first = low;
        if (low < 0 || low > stop || stop > numbers / 2)
            return refuse(&held, "expected queues within their array");
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
    return release(&held, Py_NewRef(Py_None));
}

static PyObject *
known(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "known"};
    Ring ring;
    Py_ssize_t rows, envs, count, places;
    (void)module;
    if (expect(held.name, given, 7) < 0 || read_ring(args + 1, &ring) < 0)
        return NULL;
    const uint8_t *flags;
    const int64_t *heads, *env_ids;
    int64_t *ends;
    if (!(flags = hold(&held, args[0], 0, &rows, 1)) ||
        !(heads = hold(&held, args[4], 0, &envs, 8)) ||
        !(env_ids = hold(&held, args[5], 0, &count, 8)) ||
        !(ends = hold(&held, args[6], 1, &places, 8)))
        return release(&held, NULL);
    if (rows != ring.slots * ring.num_envs || envs != ring.num_envs || count != places)
        return refuse(&held, MISFIT);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row, following;
        if (outside(&ring, env_ids[i], ends[i]))
            return refuse(&held, STRAY);
        rows_of(&ring, env_ids[i], ends[i], &row, &following);
        FETCH(flags + row);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t row, following;
        rows_of(&ring, env_ids[i], ends[i], &row, &following);
        ends[i] -= ends[i] >= heads[env_ids[i]] || !(flags[row] & FINAL);
    }
    return release(&held, Py_NewRef(Py_None));
}

enum { FUTURE, FINAL_STEP, EPISODE_STEP };

/* The position in [first, stop) of a share in [0, 1], 1 being the last. */
static inline int64_t
between(int64_t first, int64_t stop, double share)
{
    int64_t length = stop > first ? stop - first : 1;
    int64_t steps = (int64_t)(share * (double)length);
    return first + (steps < length - 1 ? steps : length - 1);
}

static PyObject *
hindsight(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "hindsight"};
    Philox chances = {.used = 4};
    Py_ssize_t counts[7];
    (void)module;
    if (expect(held.name, given, 11) < 0)
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
    if (PyErr_Occurred() || !(begins = hold(&held, args[4], 0, &counts[0], 8)) ||
        !(stops = hold(&held, args[5], 0, &counts[1], 8)) ||
        !(starts = hold(&held, args[6], 0, &counts[2], 8)) ||
        !(lasts = hold(&held, args[7], 0, &counts[3], 8)) ||
        !(chosen = hold(&held, args[8], 1, &counts[4], 1)) ||
        !(rows = hold(&held, args[9], 1, &counts[5], 8)) ||
        !(later = hold(&held, args[10], 1, &counts[6], 8)))
        return release(&held, NULL);
    Py_ssize_t count = counts[0];
    for (int at = 1; at < 7; at++)
        if (counts[at] != count)
            return refuse(&held, "expected arrays of one length");
    for (Py_ssize_t i = 0; i < count; i++)
        if (begins[i] < 0 || starts[i] < 0 || stops[i] < 0)
            return refuse(&held, STRAY);
    for (Py_ssize_t i = 0; i < count; i++)
        chosen[i] = share(&chances) < ratio && lasts[i] < stops[i];
    for (Py_ssize_t i = 0; i < count; i++) {
        double place = share(&chances);
        int64_t first = kind == EPISODE_STEP ? begins[i] : starts[i];
        later[i] = between(starts[i], stops[i], place);
        double share_of = kind == FINAL_STEP ? 1.0 : place;
        rows[i] = chosen[i] ? between(first, stops[i], share_of) : starts[i];
        if (!chosen[i])
            later[i] = starts[i];
    }
    return release(&held, Py_NewRef(Py_None));
}

static PyObject *
replace(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Held held = {.name = "replace"};
    Py_ssize_t room, count, nbytes;
    (void)module;
    if (expect(held.name, given, 4) < 0)
        return NULL;
    int64_t rows = PyLong_AsLongLong(args[1]);
    const int64_t *which;
    const char *values;
    char *out;
    if (PyErr_Occurred() || !(out = hold(&held, args[0], 1, &room, 1)) ||
        !(which = hold(&held, args[2], 0, &count, 8)) ||
        !(values = hold(&held, args[3], 0, &nbytes, 1)))
        return release(&held, NULL);
    if (rows < 0 || (rows ? room % rows : room) || (count ? nbytes % count : nbytes))
        return refuse(&held, "expected whole rows");
    Py_ssize_t wide = rows ? room / rows : 0, each = count ? nbytes / count : 0;
    if (count && (each ? wide % each : wide))
        return refuse(&held, "expected whole rows");
    for (Py_ssize_t i = 0; i < count; i++)
        if (which[i] < 0 || which[i] >= rows)
            return refuse(&held, "expected rows that there are");
    for (Py_ssize_t i = 0; each && i < count; i++)
        for (Py_ssize_t at = 0; at < wide; at += each)
            copy_short(out + which[i] * wide + at, values + i * each, (size_t)each);
    return release(&held, Py_NewRef(Py_None));
}
