/* The points of batches, divided between buffers in proportion to their masses. */

/* The greatest number below 1. */
#define BELOW_ONE (1.0 - 0x1p-53)

/* Which buffer a point falls to: the last whose edge is not above it, as long as it has
 * a share. */
static inline Py_ssize_t
buffer_of(const double *edges, const Py_ssize_t *massive, Py_ssize_t num, double point)
{
    Py_ssize_t low = 1, high = num;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (point < edges[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return massive[low - 1];
}

static PyObject *
divide(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Buffers buffers = {.name = "divide"};
    Py_ssize_t num, num_points, num_shares, num_counts;
    (void)module;
    if (expect(buffers.name, nargs, 4) < 0)
        return NULL;
    const double *fractions, *points;
    double *shares;
    int64_t *counts;
    if (!(fractions = acquire(&buffers, args[0], 0, &num, 8)) ||
        !(points = acquire(&buffers, args[1], 0, &num_points, 8)) ||
        !(shares = acquire(&buffers, args[2], 1, &num_shares, 8)) ||
        !(counts = acquire(&buffers, args[3], 1, &num_counts, 8)))
        return release(&buffers, NULL);
    Py_ssize_t num_batches = num ? num_counts / num : 0;
    Py_ssize_t size = num_batches ? num_points / num_batches : 0;
    Py_ssize_t last = num - 1;
    while (last >= 0 && !(fractions[last] > 0))
        last--;
    if (last < 0 || num_batches < 1 || num_counts != num * num_batches ||
        num_points != num_shares || num_points != size * num_batches)
        return refuse(&buffers, "a buffer must have a share, and each batch as many "
                      "points");
    double *edges = PyMem_Malloc(num * sizeof(double));
    Py_ssize_t *massive = PyMem_Malloc(num * sizeof(Py_ssize_t));
    Py_ssize_t *which = PyMem_Malloc((num_points + 1) * sizeof(Py_ssize_t));
    int64_t *ends = PyMem_Malloc(num_counts * sizeof(int64_t));
    if (!edges || !massive || !which || !ends) {
        PyErr_NoMemory();
    } else {
        double edge = 0.0;
        for (Py_ssize_t i = 0; i < num; i++) {
            edges[i] = edge;
            edge += fractions[i];
        }
        /* One without a share leaves its points to the next that has one. */
        for (Py_ssize_t i = num - 1, next = last; i >= 0; i--)
            massive[i] = next = fractions[i] > 0 ? i : i > last ? last : next;
        memset(counts, 0, num_counts * sizeof(int64_t));
        for (Py_ssize_t at = 0, batch = 0; batch < num_batches; batch++)
            for (Py_ssize_t i = 0; i < size; i++, at++) {
                which[at] = buffer_of(edges, massive, num, points[at]);
                counts[which[at] * num_batches + batch]++;
            }
        int64_t end = 0;
        for (Py_ssize_t i = 0; i < num_counts; i++) {
            ends[i] = end;
            end += counts[i];
        }
        for (Py_ssize_t at = 0, batch = 0; batch < num_batches; batch++)
            for (Py_ssize_t i = 0; i < size; i++, at++) {
                Py_ssize_t buffer = which[at];
                double own = (points[at] - edges[buffer]) / fractions[buffer];
                own = own >= 0 ? own : 0.0;
                own = own <= BELOW_ONE ? own : BELOW_ONE;
                shares[ends[buffer * num_batches + batch]++] = own;
            }
    }
    PyMem_Free(edges);
    PyMem_Free(massive);
    PyMem_Free(which);
    PyMem_Free(ends);
    return release(&buffers, PyErr_Occurred() ? NULL : Py_NewRef(Py_None));
}
