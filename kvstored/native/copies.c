/* Copies with checksums, and reads without a message, for kvstored/client. What they mean is defined by its Python, which does the same
 * where this could not be built; the stub beside this file tells what each call takes.
 */
#include "batch.h"
#include "projection.h"

/* ---- copies */

/* The pieces' sums go to `sums`, which is NULL where none are wanted. */
static void carry(const struct batch *batch, uint64_t *sums, bool past_cache)
{
    for (size_t i = 0; i < batch->piece_count; i++) {
        struct piece piece = piece_of(batch, i);
        if (sums)
            sums[i] = piece_summed(&piece, past_cache);
        else
            piece_copied(&piece, past_cache);
    }
    settle();
}

static PyObject *carried(const struct batch *batch, bool is_summed, bool past_cache)
{
    size_t count = is_summed ? batch->piece_count : 0;
    uint64_t *sums = PyMem_Malloc(count * sizeof *sums + 1);
    PyObject *list = PyList_New((Py_ssize_t)count);
    PyThreadState *alone = NULL;
    if (!sums || !list) {
        PyMem_Free(sums);
        Py_XDECREF(list);
        return PyErr_NoMemory();
    }
    if (batch->bytes > ALONE_BYTES_MAX)
        alone = PyEval_SaveThread();
    carry(batch, is_summed ? sums : NULL, past_cache);
    if (alone)
        PyEval_RestoreThread(alone);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *sum = PyLong_FromUnsignedLongLong(sums[i]);
        if (!sum || PyList_SetItem(list, (Py_ssize_t)i, sum))
            Py_CLEAR(list);
    }
    PyMem_Free(sums);
    return list;
}

static PyObject *copied(PyObject *arguments, bool (*add)(struct batch *, PyObject *, bool))
{
    PyObject *items, *sums = NULL;
    int is_inward, is_summed, past_cache;
    struct batch batch = {0};
    if (!PyArg_ParseTuple(arguments, "Oppp", &items, &is_inward, &is_summed, &past_cache))
        return NULL;
    PyObject *list = PySequence_Tuple(items);
    bool is_good = list != NULL;
    for (Py_ssize_t i = 0; is_good && i < PyTuple_Size(list); i++)
        is_good = add(&batch, PyTuple_GetItem(list, i), is_inward);
    if (is_good)
        sums = carried(&batch, is_summed, past_cache);
    end_batch(&batch);
    Py_XDECREF(list);
    return sums;
}

static PyObject *copy_runs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return copied(arguments, add_private);
}

static PyObject *copy_walks(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    return copied(arguments, add_walk);
}

/* ---- reads without a message */

/* False with an exception where the memory does not hold what the superblock says. */
static bool opened(struct projection *projection, const Py_buffer *memory, size_t tags_at,
                   size_t entries_at, size_t buckets)
{
    size_t bytes = (size_t)memory->len, slots = buckets * WAYS;
    if ((uintptr_t)memory->buf % 8 || tags_at % 8 || entries_at % 8 || !buckets ||
        buckets & (buckets - 1) || buckets > bytes / WAYS / ENTRY_BYTES || entries_at > bytes ||
        tags_at > entries_at || entries_at - tags_at < slots * TAG_BYTES ||
        bytes - entries_at < slots * ENTRY_BYTES)
        return refuse("the memory is no projection of that size");
    const uint8_t *start = memory->buf;
    *projection = (struct projection){start + tags_at, start + entries_at, buckets - 1};
    return true;
}

enum { TOGETHER = 64 };

/* Some keys at a time: what one waits for in memory is on its way for the others. */
static bool find_some(const struct projection *projection, PyObject *keys, Py_ssize_t first,
                      Py_ssize_t count, const uint8_t *digest, uint64_t seed, struct found *found,
                      Py_ssize_t *odd)
{
    XXH128_hash_t fingerprints[TOGETHER];
    int64_t slots[TOGETHER];
    char *named[TOGETHER];
    Py_ssize_t bytes[TOGETHER];
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(keys, first + i), &named[i], &bytes[i]))
            return false;
        fingerprints[i] = XXH3_128bits_withSeed(named[i], (size_t)bytes[i], seed);
        prefetch_bucket(projection, fingerprints[i]);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        slots[i] = slot_of(projection, fingerprints[i]);
        if (slots[i] >= 0)
            prefetch_entry(projection, slots[i]);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        *odd += look_at(projection, slots[i], digest, (const uint8_t *)named[i], (size_t)bytes[i],
                        &found[first + i]) == ODD;
    return true;
}

/* (absent, odd, bytes in all, segments). A row of the table has its place in one private array: every `stride` bytes, where it has to fit, or
 * where the one before it ends.
 */
static PyObject *summary(struct found *table, Py_ssize_t count, uint64_t stride, Py_ssize_t odd)
{
    Py_ssize_t absent = 0;
    uint64_t bytes = 0, last = UINT64_MAX;
    PyObject *segments = PySet_New(NULL);
    for (Py_ssize_t i = 0; segments && i < count; i++) {
        struct found *row = &table[i];
        row->start = stride ? (row->bytes > stride ? UINT64_MAX : (uint64_t)i * stride) : bytes;
        bytes += row->bytes;
        absent += !row->bytes;
        if (row->bytes && row->segment != last) {
            PyObject *number = PyLong_FromUnsignedLongLong(row->segment);
            if (!number || PySet_Add(segments, number))
                Py_CLEAR(segments);
            Py_XDECREF(number);
            last = row->segment;
        }
    }
    return segments ? Py_BuildValue("nnKN", absent, odd, (unsigned long long)bytes, segments) : NULL;
}

static PyObject *find(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer memory, digest, table;
    Py_ssize_t tags_at, entries_at, buckets, odd = 0;
    unsigned long long seed, stride;
    PyObject *keys, *answer = NULL;
    struct projection projection;
    if (!PyArg_ParseTuple(arguments, "y*nnnO!y*KKw*", &memory, &tags_at, &entries_at, &buckets,
                          &PyTuple_Type, &keys, &digest, &seed, &stride, &table))
        return NULL;
    Py_ssize_t count = PyTuple_Size(keys);
    bool is_good = opened(&projection, &memory, (size_t)tags_at, (size_t)entries_at, (size_t)buckets);
    if (is_good && (digest.len < DIGEST_BYTES || (uintptr_t)table.buf % 8 ||
                    (size_t)table.len != (size_t)count * sizeof(struct found)))
        is_good = refuse("a row for each key, and a whole digest");
    for (Py_ssize_t first = 0; is_good && first < count; first += TOGETHER) {
        Py_ssize_t some = count - first < TOGETHER ? count - first : TOGETHER;
        is_good = find_some(&projection, keys, first, some, digest.buf, seed, table.buf, &odd);
    }
    if (is_good)
        answer = summary(table.buf, count, stride, odd);
    PyBuffer_Release(&memory);
    PyBuffer_Release(&digest);
    PyBuffer_Release(&table);
    return answer;
}

enum verdict { MISS, HIT, CHANGED, MISMATCHED };

/* Where rows come from and go to: the mapped segments by number, of which the last one is `segment`, and what `read` was given. */
struct sides {
    PyObject *segments, *into, *ranges;
    struct run segment, whole;
    uint64_t number;
};

static bool take_segment(struct batch *batch, struct sides *sides, uint64_t segment)
{
    PyObject *number = PyLong_FromUnsignedLongLong(segment);
    PyObject *mapped = number ? PyDict_GetItemWithError(sides->segments, number) : NULL;
    Py_XDECREF(number);
    sides->segment = (struct run){NULL, 0};
    sides->number = segment;
    return mapped ? hold(batch, mapped, false, &sides->segment) : !PyErr_Occurred();
}

/* The row's bytes where they lie; a place outside of the mapped segments is a LookupError. */
static bool add_shared(struct batch *batch, const struct found *row, struct sides *sides)
{
    if ((!sides->segment.at || sides->number != row->segment) &&
        !take_segment(batch, sides, row->segment))
        return false;
    size_t mapped = sides->segment.bytes;
    if (row->offset > mapped || row->bytes > mapped - row->offset) {
        PyErr_SetString(PyExc_LookupError, "a place lies outside its segment");
        return false;
    }
    return add_run(batch, sides->segment.at + row->offset, row->bytes);
}

/* Where a row goes: its part of one array, an array of its own size, or a spread with ranges. */
static bool add_target(struct batch *batch, const struct found *row, const struct sides *sides,
                       Py_ssize_t i)
{
    struct run run = sides->whole;
    if (!PyTuple_Check(sides->into)) {
        if (row->start > run.bytes || row->bytes > run.bytes - row->start)
            return refuse("the array is too small");
        return add_run(batch, run.at + row->start, row->bytes);
    }
    PyObject *target = PyTuple_GetItem(sides->into, i);
    if (!target)
        return false;
    if (Py_TYPE(target) == spread_type) {
        if (!((Spread *)target)->is_writable)
            return refuse("a buffer to read into is not writable");
        return add_spread(batch, (Spread *)target, sides->ranges, row->bytes);
    }
    if (!hold(batch, target, true, &run))
        return false;
    if (run.bytes != row->bytes)
        return refuse("an array has another size than its block");
    return add_run(batch, run.at, run.bytes);
}

static bool add_row(struct batch *batch, const struct found *row, struct sides *sides, Py_ssize_t i)
{
    size_t from = batch->run_count;
    if (!add_shared(batch, row, sides))
        return false;
    size_t to = batch->run_count;
    return add_target(batch, row, sides, i) && add_piece(batch, to, from, row->bytes);
}

/* Copies, then looks whether each entry is still what it was, then whether the private copy has its sum. */
static void read_rows(const struct batch *batch, const struct projection *projection,
                      const struct found *table, size_t first, size_t last, bool past_cache,
                      uint8_t *verdicts)
{
    size_t next = 0;
    for (size_t i = first; i < last; i++) {
        verdicts[i] = MISS;
        if (!table[i].bytes)
            continue;
        struct piece piece = piece_of(batch, next++);
        uint64_t sum = piece_summed(&piece, past_cache);
        read_all();
        if (sequence_of(projection, table[i].slot) != table[i].sequence)
            verdicts[i] = CHANGED;
        else
            verdicts[i] = sum == table[i].checksum ? HIT : MISMATCHED;
    }
    settle();
}

static bool planned(struct batch *batch, const struct projection *projection,
                    const struct found *table, Py_ssize_t first, Py_ssize_t last,
                    Py_ssize_t rows, struct sides *sides)
{
    if (PyTuple_Check(sides->into) && PyTuple_Size(sides->into) != rows)
        return refuse("a target for each row");
    if (!PyTuple_Check(sides->into) && !hold(batch, sides->into, true, &sides->whole))
        return false;
    for (Py_ssize_t i = first; i < last; i++) {
        if (!table[i].bytes)
            continue;
        if (table[i].slot / WAYS > projection->bucket_mask)
            return refuse("a row names no slot");
        if (!add_row(batch, &table[i], sides, i))
            return false;
    }
    return true;
}

static PyObject *read_found(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer memory, table, verdicts;
    Py_ssize_t tags_at, entries_at, buckets, first, last;
    int past_cache;
    struct sides sides = {0};
    struct projection projection;
    struct batch batch = {0};
    if (!PyArg_ParseTuple(arguments, "y*nnny*nnO!OOpw*", &memory, &tags_at, &entries_at, &buckets,
                          &table, &first, &last, &PyDict_Type, &sides.segments, &sides.into,
                          &sides.ranges, &past_cache, &verdicts))
        return NULL;
    bool is_good = opened(&projection, &memory, (size_t)tags_at, (size_t)entries_at, (size_t)buckets);
    if (is_good && (first < 0 || last < first || last > verdicts.len || (uintptr_t)table.buf % 8 ||
                    (size_t)last > (size_t)table.len / sizeof(struct found)))
        is_good = refuse("a row and a verdict for each key");
    is_good = is_good && planned(&batch, &projection, table.buf, first, last,
                                 table.len / (Py_ssize_t)sizeof(struct found), &sides);
    if (is_good) {
        PyThreadState *alone = batch.bytes > ALONE_BYTES_MAX ? PyEval_SaveThread() : NULL;
        read_rows(&batch, &projection, table.buf, (size_t)first, (size_t)last, past_cache,
                  verdicts.buf);
        if (alone)
            PyEval_RestoreThread(alone);
    }
    end_batch(&batch);
    PyBuffer_Release(&memory);
    PyBuffer_Release(&table);
    PyBuffer_Release(&verdicts);
    return is_good ? Py_NewRef(Py_None) : NULL;
}

/* ---- the module */

static PyMethodDef methods[] = {
    {"spread", spread, METH_O, NULL},
    {"copy_runs", copy_runs, METH_VARARGS, NULL},
    {"copy_walks", copy_walks, METH_VARARGS, NULL},
    {"find", find, METH_VARARGS, NULL},
    {"read", read_found, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kvstored.native._copies", .m_size = -1, .m_methods = methods,
};

static PyType_Slot spread_slots[] = {{Py_tp_dealloc, spread_dealloc}, {0, NULL}};

static PyType_Spec spread_spec = {
    "kvstored.native._copies.Spread", sizeof(Spread), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, spread_slots,
};

PyMODINIT_FUNC PyInit__copies(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *layout = Py_BuildValue(
        "iiiiiiiiiiiiiii", WAYS, TAG_BYTES, ENTRY_WORDS, UNIT_BYTES, SEQUENCE, CHECKSUM, GENERATION,
        DIGEST_WORD, KEY_WORD, PLACE, SIZES, SUM, DIGEST_BYTES, SEGMENT_SHIFT, LENGTH_SHIFT);
    spread_type = (PyTypeObject *)PyType_FromSpec(&spread_spec);
    if (!module || !layout || !spread_type ||
        PyModule_AddObjectRef(module, "Spread", (PyObject *)spread_type) ||
        PyModule_AddObjectRef(module, "LAYOUT", layout) ||
        PyModule_AddStringConstant(module, "KERNEL", choose_kernel()))
        Py_CLEAR(module);
    Py_XDECREF(layout);
    return module;
}
