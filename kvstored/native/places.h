/* Places in the mapped segments of the daemon, by the number of the segment. */
#ifndef KVSTORED_PLACES_H
#define KVSTORED_PLACES_H

#include "batch.h"

/* The segments by number, of which the last one that was asked for is `run`. */
struct mapped {
    PyObject *segments;
    struct run run;
    uint64_t number;
    bool is_written;
};

/* An extent as messages carry it. */
struct extent {
    uint64_t segment, offset, bytes;
};

static bool take_segment(struct batch *batch, struct mapped *mapped, uint64_t segment)
{
    PyObject *number = PyLong_FromUnsignedLongLong(segment);
    PyObject *memory = number ? PyDict_GetItemWithError(mapped->segments, number) : NULL;
    Py_XDECREF(number);
    mapped->run = (struct run){NULL, 0};
    mapped->number = segment;
    return memory ? hold(batch, memory, mapped->is_written, &mapped->run) : !PyErr_Occurred();
}

/* The bytes of an extent; one outside of the mapped segments is a LookupError. */
static bool add_extent(struct batch *batch, struct mapped *mapped, struct extent extent)
{
    if ((!mapped->run.at || mapped->number != extent.segment) &&
        !take_segment(batch, mapped, extent.segment))
        return false;
    if (extent.offset > mapped->run.bytes || extent.bytes > mapped->run.bytes - extent.offset) {
        PyErr_SetString(PyExc_LookupError, "a place lies outside its segment");
        return false;
    }
    return add_run(batch, mapped->run.at + extent.offset, extent.bytes);
}

/* One source an extent, of its size. */
static bool add_filled(struct batch *batch, struct mapped *mapped, PyObject *source,
                       const uint8_t *packed)
{
    struct extent extent;
    struct run from;
    size_t to = batch->run_count;
    memcpy(&extent, packed, sizeof extent);
    if (!hold(batch, source, false, &from) || !add_extent(batch, mapped, extent))
        return false;
    if (from.bytes != extent.bytes) {
        PyErr_SetString(PyExc_LookupError, "a place has another size than its piece");
        return false;
    }
    return add_run(batch, from.at, from.bytes) &&
           add_piece(batch, to, batch->run_count - 1, from.bytes);
}

static bool all_filled(struct batch *batch, struct mapped *mapped, PyObject *sources,
                       const Py_buffer *extents)
{
    Py_ssize_t count = PyTuple_Size(sources), each = (Py_ssize_t)sizeof(struct extent);
    if (extents->len != count * each)
        return refuse("an extent for each source");
    for (Py_ssize_t i = 0; i < count; i++)
        if (!add_filled(batch, mapped, PyTuple_GetItem(sources, i),
                        (const uint8_t *)extents->buf + i * each))
            return false;
    return true;
}

#endif
