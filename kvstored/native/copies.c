/* Copies with checksums, and reads without a message, for kvstored/client. What they mean is defined by its Python, which does the same
 * where this could not be built; the stub beside this file tells what each call takes.
 */
#include "places.h"
#include "projection.h"

/* ---- copies */

/* One more whenever a call is new or takes something else: kvstored/native/__init__.py has the same number. */
enum { CALLS = 2 };

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

/* Lets others run meanwhile where that is worth it. */
static void carry_alone(const struct batch *batch, uint64_t *sums, bool past_cache)
{
    PyThreadState *alone = batch->bytes > ALONE_BYTES_MAX ? PyEval_SaveThread() : NULL;
    carry(batch, sums, past_cache);
    if (alone)
        PyEval_RestoreThread(alone);
}

static PyObject *carried(const struct batch *batch, bool is_summed, bool past_cache)
{
    size_t count = is_summed ? batch->piece_count : 0;
    uint64_t *sums = PyMem_Malloc(count * sizeof *sums + 1);
    PyObject *list = PyList_New((Py_ssize_t)count);
    if (!sums || !list) {
        PyMem_Free(sums);
        Py_XDECREF(list);
        return PyErr_NoMemory();
    }
    carry_alone(batch, is_summed ? sums : NULL, past_cache);
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

/* The sums as messages carry them. */
static PyObject *fill(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *sources, *sums = NULL;
    Py_buffer extents;
    int past_cache;
    struct mapped mapped = {.is_written = true};
    struct batch batch = {0};
    if (!PyArg_ParseTuple(arguments, "OO!y*p", &sources, &PyDict_Type, &mapped.segments, &extents,
                          &past_cache))
        return NULL;
    PyObject *list = PySequence_Tuple(sources);
    if (list && all_filled(&batch, &mapped, list, &extents))
        sums = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(batch.piece_count * sizeof(uint64_t)));
    if (sums)
        carry_alone(&batch, (uint64_t *)(void *)PyBytes_AsString(sums), past_cache);
    end_batch(&batch);
    PyBuffer_Release(&extents);
    Py_XDECREF(list);
    return sums;
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

/* Whether any key has a tag: its entry is not looked at. */
static PyObject *may_have(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer memory, keys;
    Py_ssize_t tags_at, entries_at, buckets, key_bytes;
    unsigned long long seed;
    struct projection projection;
    if (!PyArg_ParseTuple(arguments, "y*nnny*nK", &memory, &tags_at, &entries_at, &buckets, &keys,
                          &key_bytes, &seed))
        return NULL;
    bool is_there = false;
    bool is_good = opened(&projection, &memory, (size_t)tags_at, (size_t)entries_at, (size_t)buckets);
    if (is_good && (key_bytes <= 0 || keys.len % key_bytes))
        is_good = refuse("whole keys, back to back");
    for (Py_ssize_t at = 0; is_good && !is_there && at < keys.len; at += key_bytes) {
        const uint8_t *key = (const uint8_t *)keys.buf + at;
        is_there = slot_of(&projection, XXH3_128bits_withSeed(key, (size_t)key_bytes, seed)) >= 0;
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&keys);
    return is_good ? PyBool_FromLong(is_there) : NULL;
}

enum verdict { MISS, HIT, CHANGED, MISMATCHED };

/* Where rows come from and go to: the mapped segments, and what `read` was given. */
struct sides {
    PyObject *into, *ranges;
    struct mapped from;
    struct run whole;
};

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
    if (!add_extent(batch, &sides->from, (struct extent){row->segment, row->offset, row->bytes}))
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
                          &table, &first, &last, &PyDict_Type, &sides.from.segments, &sides.into,
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
    {"fill", fill, METH_VARARGS, NULL},
    {"find", find, METH_VARARGS, NULL},
    {"may_have", may_have, METH_VARARGS, NULL},
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
        "iiiiiiiiiiiiiiii", CALLS, WAYS, TAG_BYTES, ENTRY_WORDS, UNIT_BYTES, SEQUENCE, CHECKSUM, GENERATION,
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
