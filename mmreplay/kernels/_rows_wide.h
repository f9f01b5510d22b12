/* One step of several environments, checked and packed at once; see rows.py. */

enum { SCATTERED = 2 };

/* Whether an array is [E, *shape], and the bytes from an environment's value to the
 * next one's; SCATTERED where the values have strides of their own. */
static int
laid(RecordPacker *self, const Member *member, const Py_buffer *view, Py_ssize_t *apart)
{
    if (view->ndim != member->ndim + 1 || view->shape[0] != self->num_envs)
        return ODD;
    Py_ssize_t nbytes = member->itemsize;
    int layout = ACCEPTED;
    for (Py_ssize_t i = member->ndim; i > 0; i--) {
        if (view->shape[i] != member->shape[i - 1])
            return ODD;
        if (view->strides[i] != nbytes && view->shape[i] != 1)
            layout = SCATTERED;
        nbytes *= view->shape[i];
    }
    *apart = view->strides[0];
    return layout;
}

/* Puts each environment's value into its record, and the ends among `ends`. */
static void
put_each(RecordPacker *self, const Member *member, const char *from, Py_ssize_t apart,
         long *marks)
{
    size_t stride = (size_t)self->stride;
    char *to = (char *)self->rows_view.buf + member->offset;
    if (member->offset >= 0 && self->together) {
        if (apart == member->nbytes)
            copy_column(to, from, (size_t)member->nbytes, stride, self->num_envs);
        else
            for (Py_ssize_t env = 0; env < self->num_envs; env++)
                copy(to + (size_t)env * stride, from + env * apart,
                     (size_t)member->nbytes);
    }
    if (!member->mark)
        return;
    unsigned char *ends = self->ends_view.buf;
    for (Py_ssize_t env = 0; env < self->num_envs; env++)
        if (from[env * apart]) {
            ends[env] |= (unsigned char)member->mark;
            *marks |= member->mark;
        }
}

/* Long values are not packed here: their writer needs arrays. */
static int
take_each_exchanged(RecordPacker *self, const Member *member, const Exchanged *value,
                    long *marks)
{
    Seen seen;
    Py_ssize_t apart;
    if (!self->together || (member->offset < 0 && !member->mark) ||
        see(value, member, &seen) != ACCEPTED ||
        laid(self, member, &seen.view, &apart) != ACCEPTED)
        return ODD;
    put_each(self, member, seen.view.buf, apart, marks);
    return ACCEPTED;
}

static int
take_each(RecordPacker *self, const Member *member, PyObject *value, long *marks)
{
    Py_buffer view;
    const Exchanged *tensor = exchanged(value);
    if (tensor)
        return take_each_exchanged(self, member, tensor, marks);
    if ((PyObject *)Py_TYPE(value) != self->array_type)
        return ODD;
    int same = same_dtype(self, member, value);
    if (same != 1)
        return same < 0 ? FAILED : ODD;
    if (PyObject_GetBuffer(value, &view, PyBUF_STRIDED_RO) < 0) {
        PyErr_Clear();
        return ODD;
    }
    Py_ssize_t apart = 0;
    int layout = laid(self, member, &view, &apart);
    /* Of long values, which are not packed here, only the shape is checked. */
    if (layout == SCATTERED && !member->mark && (member->offset < 0 || !self->together)) {
        PyBuffer_Release(&view);
        return ACCEPTED;
    }
    if (layout == SCATTERED) {
        PyBuffer_Release(&view);
        if (bytes_of(value, &view) < 0)
            return FAILED;
        apart = member->nbytes;
        layout = ACCEPTED;
    }
    if (layout == ACCEPTED)
        put_each(self, member, view.buf, apart, marks);
    PyBuffer_Release(&view);
    return layout;
}
