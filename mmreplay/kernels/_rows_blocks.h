/* Values of many steps laid out, summed and copied for a heap; blocks.py says how. */

/* Values of one field: each at an address of its own, or one after another in `data`. */
typedef struct {
    const int64_t *addresses;
    const char *data;
    const int64_t *offsets;
    char *references;
    int64_t item;
    /* Values of the field, and items of its bytes. */
    Py_ssize_t count, items;
} Source;

typedef struct {
    Source *sources;
    Py_ssize_t fields, envs, first, stop;
    const int64_t *heads, *free;
    int64_t size;
    char *out;
    Py_ssize_t out_nbytes;
    int64_t *after, *segments;
    Py_ssize_t num_segments;
} Block;

enum { REFERENCE_NBYTES = 16, SEGMENT_NUMBERS = 4, MAX_SEGMENTS = 2 };
/* As format.md has it: sums of some of them do not wrap. */
#define MAX_VALUE_NBYTES ((int64_t)1 << 48)

static inline int64_t
value_nbytes(const Source *source, Py_ssize_t number)
{
    return (source->offsets[number + 1] - source->offsets[number]) * source->item;
}

static inline int64_t
aligned_nbytes(int64_t nbytes)
{
    return (nbytes + VALUE_ALIGNMENT - 1) / VALUE_ALIGNMENT * VALUE_ALIGNMENT;
}

/* Where a value begins that may begin at `head`: one that would cross the ring's end
 * begins behind it. */
static inline int64_t
value_begin(int64_t head, int64_t nbytes, int64_t size)
{
    int64_t left = size - head % size;
    return nbytes > left ? head + left : head;
}

/* Whether each value has bytes that are there, and fits into a heap. */
static int
values_exist(const Block *block)
{
    for (Py_ssize_t field = 0; field < block->fields; field++) {
        const Source *source = &block->sources[field];
        int64_t longest = (block->size < MAX_VALUE_NBYTES ? block->size : MAX_VALUE_NBYTES);
        longest /= source->item;
        for (Py_ssize_t i = block->first * block->envs; i < block->stop * block->envs; i++) {
            int64_t begin = source->offsets[i], end = source->offsets[i + 1];
            if (begin < 0 || end < begin || end - begin > longest ||
                end - begin > UINT32_MAX || (!source->addresses && end > source->items))
                return 0;
        }
    }
    return 1;
}

/* How many steps `out` takes; if not one, minus the bytes of the first. */
static Py_ssize_t
steps_in_memory(const Block *block)
{
    int64_t used = 0;
    for (Py_ssize_t step = block->first; step < block->stop; step++) {
        for (Py_ssize_t i = step * block->envs; i < (step + 1) * block->envs; i++)
            for (Py_ssize_t field = 0; field < block->fields; field++)
                used += aligned_nbytes(value_nbytes(&block->sources[field], i));
        if (used > block->out_nbytes)
            return step > block->first ? step - block->first : (Py_ssize_t)-used;
    }
    return block->stop - block->first;
}

/* The heap head of an environment after a step that begins at `head`. */
static int64_t
head_after(const Block *block, Py_ssize_t number, int64_t head)
{
    for (Py_ssize_t field = 0; field < block->fields; field++) {
        int64_t nbytes = value_nbytes(&block->sources[field], number);
        if (nbytes)
            head = value_begin(head, nbytes, block->size) + aligned_nbytes(nbytes);
    }
    return head;
}

/* How many of some steps the heaps of all environments take. */
static Py_ssize_t
steps_in_heaps(const Block *block, Py_ssize_t steps)
{
    for (Py_ssize_t env = 0; env < block->envs; env++) {
        int64_t head = block->heads[env];
        for (Py_ssize_t step = 0; step < steps; step++) {
            head = head_after(block, (block->first + step) * block->envs + env, head);
            if (head > block->free[env])
                steps = step;
        }
    }
    return steps;
}

/* Requested of the next value while one is copied: the processor foresees the lines of a
 * value from its first ones on, and not where the next one lies. */
enum { NEXT_VALUE_NBYTES = 1024, CACHE_LINE = 64 };

static inline const unsigned char *
value_data(const Source *source, Py_ssize_t number)
{
    if (source->addresses)
        return (const unsigned char *)(intptr_t)source->addresses[number];
    return (const unsigned char *)source->data + source->offsets[number] * source->item;
}

static inline void
request_value(const Source *source, Py_ssize_t number)
{
    int64_t nbytes = value_nbytes(source, number);
    const unsigned char *data = value_data(source, number);
    for (int64_t at = 0; at < nbytes && at < NEXT_VALUE_NBYTES; at += CACHE_LINE)
        __builtin_prefetch(data + at);
}

/* Notes that bytes [begin, end) of `out` go to one environment's heap. */
static void
end_segment(Block *block, Py_ssize_t env, int64_t begin, int64_t end, int64_t position)
{
    if (end <= begin)
        return;
    int64_t *segment = block->segments + SEGMENT_NUMBERS * block->num_segments++;
    segment[0] = env;
    segment[1] = begin;
    segment[2] = end;
    segment[3] = position;
}

/* Packs the values of one environment from byte `at` of `out` on; returns where they end. */
static int64_t
pack_env(Block *block, Py_ssize_t env, Py_ssize_t steps, int64_t at)
{
    /* The last value ends at `end`: the zeros behind it are not written. */
    int64_t head = block->heads[env], begin = at, end = at, position = head;
    Py_ssize_t fields = block->fields, stop = block->first + steps;
    for (Py_ssize_t step = block->first; step < stop; step++)
        for (Py_ssize_t field = 0; field < fields; field++) {
            const Source *source = &block->sources[field];
            Py_ssize_t number = step * block->envs + env;
            int64_t nbytes = value_nbytes(source, number);
            char *reference = source->references + REFERENCE_NBYTES * number;
            if (field + 1 < fields)
                request_value(source + 1, number);
            else if (step + 1 < stop)
                request_value(block->sources, number + block->envs);
            if (nbytes == 0) {
                memset(reference, 0, REFERENCE_NBYTES);
                continue;
            }
            int64_t start = value_begin(head, nbytes, block->size);
            /* Where the ring begins again: once at most, as no heap takes more than its
             * bytes, so that two segments of each environment are enough. */
            if (start % block->size == 0) {
                end_segment(block, env, begin, end, position);
                begin = at;
                position = start;
            }
            uint32_t length = (uint32_t)(nbytes / source->item);
            uint32_t crc = ~fold_copy(~(uint32_t)0, value_data(source, number),
                                      (size_t)nbytes, (unsigned char *)block->out + at);
            /* With zeros up to where the next value may begin. */
            head = start + aligned_nbytes(nbytes);
            memset(block->out + at + nbytes, 0, (size_t)(head - start - nbytes));
            memcpy(reference, &start, 8);
            memcpy(reference + 8, &length, 4);
            memcpy(reference + 12, &crc, 4);
            end = at + nbytes;
            at += head - start;
        }
    block->after[env] = head;
    end_segment(block, env, begin, end, position);
    return at;
}

/* Packs as many steps as there is memory and heap for; returns their number, 0 where the
 * heap takes none, or minus the bytes that the first one needs. */
static Py_ssize_t
pack_block(Block *block)
{
    int64_t at = 0;
    Py_ssize_t steps = steps_in_memory(block);
    if (steps < 0)
        return steps;
    steps = steps_in_heaps(block, steps);
    for (Py_ssize_t env = 0; env < block->envs; env++)
        if (steps > 0)
            at = pack_env(block, env, steps, at);
        else
            block->after[env] =
                block->stop == block->first
                    ? block->heads[env]
                    : head_after(block, block->first * block->envs + env, block->heads[env]);
    return steps;
}

/* Arguments in the order of the call; those of fields come first. */
enum { SOURCES, OFFSETS, REFERENCES, ADDRESSES, ITEMS, HEADS, FREE, OUT, AFTER, SEGMENTS, NUM_OBJECTS };

/* Acquires the arrays of each field; returns how many views were taken, and whether all
 * are as they must be. */
static int
read_sources(Block *block, PyObject *const *objects, const int64_t *items, Py_buffer *views,
             int *taken)
{
    Py_ssize_t values = -1;
    for (Py_ssize_t field = 0; field < block->fields; field++) {
        Source *source = &block->sources[field];
        PyObject *values_of = PyTuple_GetItem(objects[SOURCES], field);
        PyObject *offsets = PyTuple_GetItem(objects[OFFSETS], field);
        PyObject *references = PyTuple_GetItem(objects[REFERENCES], field);
        PyObject *addresses = PyTuple_GetItem(objects[ADDRESSES], field);
        Py_buffer *view = &views[*taken];
        if (offsets == NULL || references == NULL || addresses == NULL ||
            contiguous(offsets, view, 0) < 0)
            return -1;
        source->offsets = view->buf;
        source->count = view->len / 8 - 1;
        view = &views[++*taken];
        if (contiguous(references, view, 1) < 0)
            return -1;
        source->references = view->buf;
        ++*taken;
        if (field == 0)
            values = source->count;
        source->item = items[field];
        if (source->item < 1 || source->count != values || values < 0 ||
            view->len != REFERENCE_NBYTES * values)
            return 0;
        /* A tuple holds the values, so that they stay where they are. */
        int listed = PyTuple_CheckExact(values_of);
        view = &views[*taken];
        if (contiguous(listed ? addresses : values_of, view, 0) < 0)
            return -1;
        ++*taken;
        if (!listed) {
            source->data = view->buf;
            source->items = view->len / source->item;
        }
        else if (PyTuple_Size(values_of) == values && view->len == 8 * values)
            source->addresses = view->buf;
        else
            return 0;
    }
    return block->stop <= values / block->envs;
}

/* Whether the heaps' bounds are such that each takes at most its bytes. */
static int
heaps_exist(const Block *block)
{
    for (Py_ssize_t env = 0; env < block->envs; env++) {
        int64_t head = block->heads[env], free = block->free[env];
        if (head < 0 || head % VALUE_ALIGNMENT || head > INT64_MAX / 4 ||
            free > INT64_MAX / 4 || free - head > block->size)
            return 0;
    }
    return block->size >= 1 && block->size <= INT64_MAX / 4 &&
           block->size % VALUE_ALIGNMENT == 0;
}

static PyObject *
pack_values(PyObject *module, PyObject *args)
{
    enum { NUM_ARRAYS = NUM_OBJECTS - ITEMS };
    PyObject *objects[NUM_OBJECTS], *result = NULL;
    Block block = {0};
    long long size;
    int taken = 0, status = -1;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OnnnOOLOOO:pack_values", &PyTuple_Type,
                          &objects[SOURCES], &PyTuple_Type, &objects[OFFSETS],
                          &PyTuple_Type, &objects[REFERENCES], &PyTuple_Type,
                          &objects[ADDRESSES], &objects[ITEMS], &block.envs, &block.first,
                          &block.stop, &objects[HEADS], &objects[FREE], &size,
                          &objects[OUT], &objects[AFTER], &objects[SEGMENTS]))
        return NULL;
    block.size = size;
    block.fields = PyTuple_Size(objects[SOURCES]);
    block.sources = PyMem_Calloc((size_t)block.fields + 1, sizeof *block.sources);
    Py_buffer *views =
        PyMem_Calloc((size_t)block.fields * 3 + NUM_ARRAYS, sizeof *views);
    if (block.sources == NULL || views == NULL) {
        PyMem_Free(block.sources);
        PyMem_Free(views);
        return PyErr_NoMemory();
    }
    while (taken < NUM_ARRAYS &&
           contiguous(objects[ITEMS + taken], &views[taken], ITEMS + taken >= OUT) == 0)
        taken++;
    if (taken == NUM_ARRAYS) {
        const Py_buffer *items = &views[0], *heads = &views[HEADS - ITEMS];
        const Py_buffer *until = &views[FREE - ITEMS], *out = &views[OUT - ITEMS];
        const Py_buffer *after = &views[AFTER - ITEMS];
        const Py_buffer *segments = &views[SEGMENTS - ITEMS];
        block.heads = heads->buf, block.free = until->buf;
        block.out = out->buf, block.out_nbytes = out->len;
        block.after = after->buf, block.segments = segments->buf;
        Py_ssize_t nbytes = 8 * block.envs;
        status = block.fields > 0 && block.envs > 0 && block.envs < PY_SSIZE_T_MAX / 64 &&
                 items->len == 8 * block.fields && heads->len == nbytes &&
                 until->len == nbytes && after->len == nbytes &&
                 segments->len >= MAX_SEGMENTS * SEGMENT_NUMBERS * nbytes &&
                 block.first >= 0 && block.first <= block.stop && heaps_exist(&block);
        if (status > 0)
            status = read_sources(&block, objects, items->buf, views, &taken);
        if (status > 0)
            status = values_exist(&block);
        if (status == 0)
            PyErr_Format(PyExc_ValueError,
                         "pack_values: values must exist, and arrays fit each other");
        if (status > 0) {
            PyThreadState *state = block.out_nbytes > LENGTHY ? PyEval_SaveThread() : NULL;
            Py_ssize_t steps = pack_block(&block);
            if (state)
                PyEval_RestoreThread(state);
            result = Py_BuildValue("nn", steps, block.num_segments);
        }
    }
    while (taken--)
        PyBuffer_Release(&views[taken]);
    PyMem_Free(views);
    PyMem_Free(block.sources);
    return result;
}
