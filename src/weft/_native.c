/* Batched memory work for weft: copies, writes into another process, and the digest.
 *
 * Every function takes parallel columns of unsigned 64-bit numbers (addresses, lengths, positions) as contiguous
 * buffers, releases the interpreter lock while it works, and can use several threads. Addresses are not checked here:
 * the transports only pass addresses inside memory that was registered with them.
 *
 * Callers: weft/native.py, which has a slower fallback for machines without this module.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define MAX_COLUMNS 10
#define MAX_THREADS 64
#define IOVECS_PER_CALL 1024              /* the kernel's limit */
#define BYTES_PER_CALL ((uint64_t)1 << 30) /* larger requests return short */
#define CACHED_BYTES ((uint64_t)256 << 10) /* what a core's own cache holds beside everything else */

typedef struct {
    Py_buffer views[MAX_COLUMNS];
    const uint64_t *column[MAX_COLUMNS];
    int num_columns;
    Py_ssize_t num_rows;
} Columns;

static void columns_release(Columns *columns) {
    for (int i = 0; i < columns->num_columns; i++) PyBuffer_Release(&columns->views[i]);
}

/* Fills `columns` from objects that hold equally many 8-byte items; returns 0, or -1 with an exception set. */
static int columns_get(Columns *columns, PyObject **objects, int num_columns) {
    columns->num_columns = 0;
    for (int i = 0; i < num_columns; i++) {
        Py_buffer *view = &columns->views[i];
        if (PyObject_GetBuffer(objects[i], view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
            columns_release(columns);
            return -1;
        }
        columns->num_columns++;
        if (view->itemsize != 8 || view->ndim != 1) {
            columns_release(columns);
            PyErr_SetString(PyExc_TypeError, "expected one-dimensional columns of 8-byte integers");
            return -1;
        }
        Py_ssize_t num_rows = view->len / 8;
        if (i > 0 && num_rows != columns->num_rows) {
            columns_release(columns);
            PyErr_SetString(PyExc_ValueError, "columns have different lengths");
            return -1;
        }
        columns->num_rows = num_rows;
        columns->column[i] = (const uint64_t *)view->buf;
    }
    return 0;
}

/* One thread's share of the bytes: from byte `begin` to byte `end` of all rows laid one after the other. */
typedef struct Share {
    const Columns *columns;
    uint64_t begin, end;
    uint64_t *sums; /* one for each group of rows, shared by all threads */
    uint64_t num_sums;
    uint64_t result;
    void (*work)(struct Share *share);
} Share;

static void *share_run(void *argument) {
    Share *share = (Share *)argument;
    share->work(share);
    return NULL;
}

/* Splits all bytes evenly over threads and adds up their results. Lengths are the last column. */
static uint64_t run_shares(const Columns *columns, int num_threads, void (*work)(Share *), uint64_t *sums, uint64_t num_sums) {
    const uint64_t *length = columns->column[columns->num_columns - 1];
    uint64_t total = 0, result = 0;
    for (Py_ssize_t i = 0; i < columns->num_rows; i++) total += length[i];
    if (num_threads < 1 || total < ((uint64_t)1 << 20)) num_threads = 1;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    Share shares[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    uint64_t step = (total / (uint64_t)num_threads) & ~(uint64_t)4095;
    for (int t = 0; t < num_threads; t++) {
        shares[t] = (Share){columns, step * (uint64_t)t, t + 1 == num_threads ? total : step * (uint64_t)(t + 1), sums, num_sums, 0, work};
        if (t > 0) started[t] = pthread_create(&threads[t], NULL, share_run, &shares[t]) == 0;
    }
    work(&shares[0]);
    for (int t = 0; t < num_threads; t++) {
        if (t > 0 && started[t]) pthread_join(threads[t], NULL);
        else if (t > 0) work(&shares[t]); /* no thread available: do it here */
        result += shares[t].result;
    }
    return result;
}

typedef uint64_t Pair __attribute__((vector_size(16))); /* what every 64-bit machine has registers for */

static inline Pair load_pair(const unsigned char *src) {
    Pair pair;
    memcpy(&pair, src, sizeof pair);
    return pair;
}

static inline void store_pair(unsigned char *dst, Pair pair) { memcpy(dst, &pair, sizeof pair); }

/* Lines that a copy will need soon, asked for before it gets there. On x86 (Xeon, two cores copying) that makes a copy
 * 1.14 times as fast and a copy with a digest 1.2 times: the processor's own prefetching ends at every page, and its
 * stores wait for their lines. Elsewhere stores of whole lines need no such help, so it is left out. */
#if defined(__x86_64__)
#define ASKS_AHEAD 1
#define READ_AHEAD 2048
#else
#define ASKS_AHEAD 0
#define READ_AHEAD 1024
#endif
#define WRITE_AHEAD 1024
#define LONG_ROW ((uint64_t)64 << 10)

/* How far ahead of a row's bytes its next lines lie: `distance` bytes on, and from where that is beyond the row's end
 * `jump` more. Short rows of a strided plane look just into the next row. */
typedef struct {
    uint64_t distance, jump;
} Ahead;

static const Ahead read_on = {READ_AHEAD, 0}, write_on = {WRITE_AHEAD, 0};

static inline Ahead look_ahead(Ahead plain, uint64_t length, uint64_t stride, uint64_t width) {
    if (stride == width || stride == 0) return plain;
    return (Ahead){length < plain.distance ? length : plain.distance, stride - length};
}

static inline const unsigned char *soon(const unsigned char *now, uint64_t left, Ahead ahead) {
    return now + ahead.distance + (left > ahead.distance ? 0 : ahead.jump);
}

/* memcpy() writes the ends of a short row twice, which costs the processor its streaming of whole lines: rows of a few
 * kilobytes then move at a third of the speed (measured). A plain loop writes every line once, in order. With lines asked
 * for ahead it is faster for long rows, too. */
static inline __attribute__((always_inline)) void copy_lines(int asks_ahead, unsigned char *restrict dst, const unsigned char *restrict src, uint64_t size, Ahead read, Ahead write) {
#pragma GCC unroll 1
    for (; size >= 64; size -= 64, src += 64, dst += 64) {
        if (asks_ahead) __builtin_prefetch(soon(src, size, read)), __builtin_prefetch(soon(dst, size, write), 1);
        Pair first = load_pair(src), second = load_pair(src + 16), third = load_pair(src + 32), fourth = load_pair(src + 48);
        store_pair(dst, first), store_pair(dst + 16, second), store_pair(dst + 32, third), store_pair(dst + 48, fourth);
    }
    if (size > 0) memcpy(dst, src, (size_t)size);
}

static inline void copy_row(unsigned char *restrict dst, const unsigned char *restrict src, uint64_t size, Ahead read, Ahead write) {
    if (!ASKS_AHEAD && size >= LONG_ROW) memcpy(dst, src, (size_t)size);
    else copy_lines(ASKS_AHEAD, dst, src, size, read, write);
}

static void copy_share(Share *share) {
    const uint64_t *dst = share->columns->column[0], *src = share->columns->column[1], *length = share->columns->column[2];
    uint64_t position = 0;
    for (Py_ssize_t i = 0; i < share->columns->num_rows && position < share->end; position += length[i], i++) {
        if (position + length[i] <= share->begin) continue;
        uint64_t from = position < share->begin ? share->begin - position : 0;
        uint64_t to = position + length[i] > share->end ? share->end - position : length[i];
        copy_row((unsigned char *)(uintptr_t)(dst[i] + from), (const unsigned char *)(uintptr_t)(src[i] + from), to - from, read_on, write_on);
        share->result += to - from;
    }
}

/* The digest: a weighted sum of bytes, modulo 2^64, so that digests of parts add up however the whole was cut.
 *
 * The digest's space consists of words of 8 bytes; 8 words make a row of 64 bytes, 256 rows a block of 16 KiB. Word `w`
 * of column `j` in row `k` of block `b` contributes
 *     block_weight(b) * ((alpha[j] + beta[j] * (256 - k)) * w + gamma[j] * (w >> 32))
 * The row's factor needs no multiplication: summing the running sums once more weighs early rows more (Fletcher's idea).
 * The second term gives the upper half of a word, whose weight would lose its upper bits, a weight of its own. Weights
 * are odd, so no single wrong word goes undetected. Both ends of a transfer must agree on them, on every machine and
 * device; weft/native.py has the same in NumPy. It guards against lost, misplaced and torn writes, not against malice. */
#define COLUMNS 8
#define ROWS 256
#define ROW_BYTES ((uint64_t)(8 * COLUMNS))
#define BLOCK_BYTES (ROW_BYTES * ROWS)
#define MANY_ROWS 3 /* weighing the sums of fewer takes longer than weighing their words (measured) */
static uint64_t alpha[COLUMNS], beta[COLUMNS], gamma_[COLUMNS];

static uint64_t mix(uint64_t x) { /* SplitMix64 */
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static uint64_t block_weight(uint64_t block) { return mix(block) | 1; }

static void make_weights(void) {
    for (uint64_t j = 0; j < COLUMNS; j++) {
        alpha[j] = mix(~(3 * j)) | 1;
        beta[j] = mix(~(3 * j + 1)) & ~UINT64_C(1);
        gamma_[j] = mix(~(3 * j + 2)) | 1;
    }
}

/* `size` bytes inside one row, at byte `position` of the digest's space; parts of words are padded with zeros. */
static inline uint64_t digest_words(const unsigned char *src, uint64_t size, uint64_t position) {
    uint64_t total = 0, below = ROWS - position / ROW_BYTES % ROWS, skip = position % 8;
    for (uint64_t j = position / 8 % COLUMNS; size > 0; j++, skip = 0) {
        uint64_t word = 0, step = 8 - skip < size ? 8 - skip : size;
        if (step == 8) memcpy(&word, src, 8);
        else memcpy((unsigned char *)&word + skip, src, (size_t)step); /* little-endian hosts only, as weft's files are */
        total += (alpha[j] + beta[j] * below) * word + gamma_[j] * (word >> 32);
        src += step, size -= step;
    }
    return block_weight(position / BLOCK_BYTES) * total;
}

/* A whole row. A loop that stays one: compilers that see all words at once move them through vectors, which is slower. */
static inline uint64_t digest_row(const unsigned char *src, uint64_t position) {
    uint64_t total = 0, below = ROWS - position / ROW_BYTES % ROWS;
#pragma GCC unroll 1
    for (int j = 0; j < COLUMNS; j++) {
        uint64_t word;
        memcpy(&word, src + 8 * j, 8);
        total += (alpha[j] + beta[j] * below) * word + gamma_[j] * (word >> 32);
    }
    return block_weight(position / BLOCK_BYTES) * total;
}

/* Three sums over one pair of columns. Named variables, not arrays: compilers keep them in registers that way. */
typedef struct {
    Pair sum, rising, upper;
} Sums;

static inline __attribute__((always_inline)) void add_pair(Sums *sums, Pair pair) {
    sums->sum += pair;
    sums->rising += sums->sum;
    sums->upper += pair >> 32;
}

static inline __attribute__((always_inline)) uint64_t weigh(const Sums *sums, uint64_t below) {
    uint64_t total = 0;
#pragma GCC unroll 1
    for (int j = 0; j < COLUMNS; j++) { /* one after the other: registers that had to be saved would cost more */
        const Sums *pair = &sums[j / 2];
        total += (alpha[j] + beta[j] * below) * pair->sum[j % 2] + beta[j] * pair->rising[j % 2] + gamma_[j] * pair->upper[j % 2];
    }
    return total;
}

/* `num_rows` whole rows inside one block, copied to `dst` on the way if `copying`; `below` rows of the block come after,
 * `left` bytes of the run from here on.
 * Little but the copy is stored: processors write whole lines past their caches as long as a stream of stores is not
 * interrupted by stores to other lines. Three are harmless, four are not (measured: 15 GB/s against 11, Neoverse N1), so
 * the sums are stored once, in three lines. */
static inline __attribute__((always_inline)) uint64_t sum_rows(int copying, unsigned char *restrict dst, const unsigned char *restrict src, uint64_t num_rows, uint64_t below, uint64_t left, Ahead read, Ahead write) {
    const Pair zero = {0, 0};
    Sums a = {zero, zero, zero}, b = a, c = a, d = a;
    for (uint64_t i = 0; i < num_rows; i++, src += ROW_BYTES) {
        Pair first = load_pair(src), second = load_pair(src + 16), third = load_pair(src + 32), fourth = load_pair(src + 48);
        if (ASKS_AHEAD || !copying) __builtin_prefetch(soon(src, left, read)); /* memory stays busy while a block is weighed */
        if (ASKS_AHEAD && copying) __builtin_prefetch(soon(dst, left, write), 1);
        left -= ROW_BYTES;
        if (copying) {
            store_pair(dst, first), store_pair(dst + 16, second), store_pair(dst + 32, third), store_pair(dst + 48, fourth);
            dst += ROW_BYTES;
        }
        add_pair(&a, first), add_pair(&b, second), add_pair(&c, third), add_pair(&d, fourth);
    }
    _Alignas(64) Sums sums[4] = {a, b, c, d};
    __asm__ volatile("" : : "r"(sums) : "memory"); /* weighed from memory: there are not enough registers for all at once */
    return weigh(sums, below);
}

/* Functions of their own: they need no more registers than a callee may use, so nothing is spilled to memory. */
static __attribute__((noinline)) uint64_t copy_rows(unsigned char *restrict dst, const unsigned char *restrict src, uint64_t num_rows, uint64_t below, uint64_t left, Ahead read, Ahead write) {
    return sum_rows(1, dst, src, num_rows, below, left, read, write);
}

static __attribute__((noinline)) uint64_t read_rows(const unsigned char *restrict src, uint64_t num_rows, uint64_t below, uint64_t left, Ahead read) {
    return sum_rows(0, NULL, src, num_rows, below, left, read, write_on);
}

/* `size` bytes inside one row, copied to `dst` on the way if `copying`. */
static inline __attribute__((always_inline)) uint64_t digest_part(int copying, unsigned char *restrict dst, const unsigned char *restrict src, uint64_t size, uint64_t position) {
    if (size == ROW_BYTES) {
        if (copying) memcpy(dst, src, ROW_BYTES);
        return digest_row(src, position);
    }
    if (copying) memcpy(dst, src, (size_t)size);
    return digest_words(src, size, position);
}

/* `size` bytes that lie at byte `position` of the digest's space, copied to `dst` on the way if `copying`. */
static inline __attribute__((always_inline)) uint64_t digest_run(int copying, unsigned char *restrict dst, const unsigned char *restrict src, uint64_t size, uint64_t position, Ahead read, Ahead write) {
    uint64_t total = 0;
    while (size > 0) {
        uint64_t step = ROW_BYTES - position % ROW_BYTES;
        if (step == ROW_BYTES && size >= MANY_ROWS * ROW_BYTES) {
            uint64_t left = BLOCK_BYTES - position % BLOCK_BYTES;
            step = (size < left ? size : left) & ~(ROW_BYTES - 1);
            uint64_t num_rows = step / ROW_BYTES, below = (left - step) / ROW_BYTES;
            total += block_weight(position / BLOCK_BYTES) * (copying ? copy_rows(dst, src, num_rows, below, size, read, write) : read_rows(src, num_rows, below, size, read));
        } else {
            step = step < size ? step : size;
            total += digest_part(copying, dst, src, step, position);
        }
        src += step, position += step, size -= step;
        if (copying) dst += step;
    }
    return total;
}

/* Functions of their own again: walking short rows, few of which need these, keeps its registers. */
static __attribute__((noinline)) uint64_t copy_digest_run(unsigned char *restrict dst, const unsigned char *restrict src, uint64_t size, uint64_t position) {
    return digest_run(1, dst, src, size, position, read_on, write_on);
}

static __attribute__((noinline)) uint64_t read_digest_run(const unsigned char *restrict src, uint64_t size, uint64_t position) {
    return digest_run(0, NULL, src, size, position, read_on, write_on);
}

static void digest_share(Share *share) {
    const uint64_t *address = share->columns->column[0], *where = share->columns->column[1], *length = share->columns->column[2];
    uint64_t position = 0;
    for (Py_ssize_t i = 0; i < share->columns->num_rows && position < share->end; position += length[i], i++) {
        if (position + length[i] <= share->begin) continue;
        uint64_t from = position < share->begin ? share->begin - position : 0;
        uint64_t to = position + length[i] > share->end ? share->end - position : length[i];
        share->result += digest_run(0, NULL, (const unsigned char *)(uintptr_t)(address[i] + from), to - from, where[i] + from, read_on, write_on);
    }
}

/* Copy and digest in one pass: the digest hides behind the memory traffic of the copy. Rows belong to groups (receivers),
 * each with a sum of its own, so that rows of several receivers can be copied in the order of their sources. */
static void copy_digest_share(Share *share) {
    const uint64_t *dst = share->columns->column[0], *src = share->columns->column[1], *where = share->columns->column[2];
    const uint64_t *group = share->columns->column[3], *length = share->columns->column[4];
    uint64_t position = 0;
    uint64_t *sums = (uint64_t *)calloc(share->num_sums, sizeof(uint64_t));
    if (!sums) return; /* the sums stay wrong, which is detected */
    for (Py_ssize_t i = 0; i < share->columns->num_rows && position < share->end; position += length[i], i++) {
        if (position + length[i] <= share->begin) continue;
        uint64_t from = position < share->begin ? share->begin - position : 0;
        uint64_t to = position + length[i] > share->end ? share->end - position : length[i];
        unsigned char *into = (unsigned char *)(uintptr_t)(dst[i] + from);
        const unsigned char *out = (const unsigned char *)(uintptr_t)(src[i] + from);
        if (group[i] < share->num_sums) sums[group[i]] += digest_run(1, into, out, to - from, where[i] + from, read_on, write_on);
        else copy_row(into, out, to - from, read_on, write_on); /* digested with another group */
    }
    for (uint64_t g = 0; g < share->num_sums; g++) __atomic_fetch_add(&share->sums[g], sums[g], __ATOMIC_RELAXED);
    free(sums);
}

/* Planes: `rows` runs of `length` bytes each, `dst_stride` and `src_stride` bytes apart. Neighbouring planes with the same
 * bundle number have equally many rows and are walked together, row by row: what several engines take of one source row is
 * read from memory once. */
enum { PLANE_DST, PLANE_SRC, PLANE_ROWS, PLANE_LENGTH, PLANE_DST_STRIDE, PLANE_SRC_STRIDE, PLANE_BUNDLE, PLANE_POSITION, PLANE_POSITION_STRIDE, PLANE_GROUP };

#define FEW 16                        /* planes that are looked ahead */
#define SHORT_ROW ((uint64_t)1 << 10) /* nothing inside a shorter row is looked ahead: what is next is another plane */

typedef struct PlaneShare {
    const Columns *columns;
    uint64_t begin, end; /* rows that begin at these bytes, all bundles laid one after the other */
    uint64_t *sums;
    uint64_t num_sums;
    uint64_t result;
    int copying, digesting;
} PlaneShare;

static inline uint64_t plane_row(const PlaneShare *share, Py_ssize_t i, uint64_t row, uint64_t width) {
    const uint64_t *const *column = (const uint64_t *const *)share->columns->column;
    unsigned char *dst = (unsigned char *)(uintptr_t)(column[PLANE_DST][i] + row * column[PLANE_DST_STRIDE][i]);
    const unsigned char *src = (const unsigned char *)(uintptr_t)(column[PLANE_SRC][i] + row * column[PLANE_SRC_STRIDE][i]);
    uint64_t length = column[PLANE_LENGTH][i];
    Ahead read = look_ahead(read_on, length, column[PLANE_SRC_STRIDE][i], width);
    Ahead write = look_ahead(write_on, length, column[PLANE_DST_STRIDE][i], length);
    if (!share->digesting || column[PLANE_GROUP][i] >= share->num_sums) {
        if (share->copying) copy_row(dst, src, length, read, write);
        return 0;
    }
    uint64_t position = column[PLANE_POSITION][i] + row * column[PLANE_POSITION_STRIDE][i];
    return share->copying ? digest_run(1, dst, src, length, position, read, write) : digest_run(0, NULL, src, length, position, read, write);
}

/* A short row. Most lie inside one row of the digest's space. */
static inline __attribute__((always_inline)) uint64_t digest_short_row(int copying, unsigned char *restrict dst, const unsigned char *restrict src, uint64_t size, uint64_t position) {
    if (position % ROW_BYTES + size <= ROW_BYTES) return digest_part(copying, dst, src, size, position);
    return copying ? copy_digest_run(dst, src, size, position) : read_digest_run(src, size, position);
}

/* The first lines of a plane, which may be anywhere. */
static inline __attribute__((always_inline)) void ask_for_plane(int copying, const PlaneShare *share, Py_ssize_t i) {
    if (i >= share->columns->num_rows) return;
    __builtin_prefetch((const void *)(uintptr_t)share->columns->column[PLANE_SRC][i]);
    if (copying) __builtin_prefetch((const void *)(uintptr_t)share->columns->column[PLANE_DST][i], 1);
}

static inline int is_short(const Columns *columns, Py_ssize_t i) {
    return columns->column[PLANE_ROWS][i] == 1 && columns->column[PLANE_LENGTH][i] < SHORT_ROW;
}

/* Planes of one short row each, from plane `i` on, which begins at byte `*position`; returns the plane after them.
 * A bundle of single rows is walked in the order of its planes anyway. */
static inline __attribute__((always_inline)) Py_ssize_t walk_short(int copying, int digesting, PlaneShare *share, Py_ssize_t i, uint64_t *position, uint64_t *sums) {
    const Columns *columns = share->columns;
    const uint64_t *dst = columns->column[PLANE_DST], *src = columns->column[PLANE_SRC], *length = columns->column[PLANE_LENGTH];
    const uint64_t *where = columns->column[PLANE_POSITION], *group = columns->column[PLANE_GROUP];
    uint64_t at = *position, walked = 0;
    for (; i < columns->num_rows && is_short(columns, i) && at < share->end; at += length[i], i++) {
        if (at < share->begin) continue;
        ask_for_plane(copying, share, i + FEW);
        unsigned char *into = (unsigned char *)(uintptr_t)dst[i];
        const unsigned char *out = (const unsigned char *)(uintptr_t)src[i];
        if (digesting && group[i] < share->num_sums) sums[group[i]] += digest_short_row(copying, into, out, length[i], where[i]);
        else if (copying) copy_lines(0, into, out, length[i], read_on, write_on);
        walked += length[i];
    }
    share->result += walked;
    *position = at;
    return i;
}

static __attribute__((noinline)) Py_ssize_t copy_short(PlaneShare *share, Py_ssize_t i, uint64_t *position) {
    return walk_short(1, 0, share, i, position, NULL);
}

static __attribute__((noinline)) Py_ssize_t digest_short(PlaneShare *share, Py_ssize_t i, uint64_t *position, uint64_t *sums) {
    return walk_short(0, 1, share, i, position, sums);
}

static __attribute__((noinline)) Py_ssize_t copy_digest_short(PlaneShare *share, Py_ssize_t i, uint64_t *position, uint64_t *sums) {
    return walk_short(1, 1, share, i, position, sums);
}

static void *plane_share_run(void *argument) {
    PlaneShare *share = (PlaneShare *)argument;
    const Columns *columns = share->columns;
    const uint64_t *rows = columns->column[PLANE_ROWS], *length = columns->column[PLANE_LENGTH], *bundle = columns->column[PLANE_BUNDLE];
    uint64_t *sums = share->digesting ? (uint64_t *)calloc(share->num_sums + 1, sizeof(uint64_t)) : NULL;
    if (share->digesting && !sums) return NULL; /* the sums stay wrong, which is detected */
    uint64_t position = 0;
    for (Py_ssize_t first = 0, next; first < columns->num_rows && position < share->end; first = next) {
        if (is_short(columns, first)) {
            if (!sums) next = copy_short(share, first, &position);
            else if (share->copying) next = copy_digest_short(share, first, &position, sums);
            else next = digest_short(share, first, &position, sums);
            continue;
        }
        uint64_t width = 0;
        for (next = first; next < columns->num_rows && bundle[next] == bundle[first]; next++) width += length[next];
        uint64_t total = width * rows[first];
        if (total > 0 && position + total > share->begin) {
            uint64_t from = position < share->begin ? (share->begin - position + width - 1) / width : 0;
            uint64_t to = position + total > share->end ? (share->end - position + width - 1) / width : rows[first];
            for (Py_ssize_t i = first; i < next; i++) ask_for_plane(share->copying, share, i + FEW);
            for (uint64_t row = from; row < to; row++) {
                for (Py_ssize_t i = first; i < next; i++) {
                    uint64_t found = plane_row(share, i, row, width);
                    if (sums && columns->column[PLANE_GROUP][i] < share->num_sums) sums[columns->column[PLANE_GROUP][i]] += found;
                }
            }
            if (to > from) share->result += (to - from) * width;
        }
        position += total;
    }
    for (uint64_t g = 0; sums && g < share->num_sums; g++) __atomic_fetch_add(&share->sums[g], sums[g], __ATOMIC_RELAXED);
    free(sums);
    return NULL;
}

/* walk_planes(dst, src, rows, length, dst_stride, src_stride, bundle[, position, position_stride, group], sums, copying, threads) */
static PyObject *native_walk_planes(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *table, *into, *objects[MAX_COLUMNS];
    int copying, num_threads;
    if (!PyArg_ParseTuple(args, "O!Opi:walk_planes", &PyTuple_Type, &table, &into, &copying, &num_threads)) return NULL;
    int num_columns = (int)PyTuple_GET_SIZE(table), digesting = num_columns == MAX_COLUMNS;
    if (!digesting && num_columns != PLANE_BUNDLE + 1) {
        PyErr_SetString(PyExc_TypeError, "expected 7 columns, or 10 with positions");
        return NULL;
    }
    for (int i = 0; i < num_columns; i++) objects[i] = PyTuple_GET_ITEM(table, i);
    Py_buffer sums;
    if (PyObject_GetBuffer(into, &sums, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return NULL;
    Columns columns;
    if (columns_get(&columns, objects, num_columns) < 0) {
        PyBuffer_Release(&sums);
        return NULL;
    }
    uint64_t total = 0, result = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < columns.num_rows; i++) total += columns.column[PLANE_ROWS][i] * columns.column[PLANE_LENGTH][i];
    if (num_threads < 1 || total < ((uint64_t)1 << 20)) num_threads = 1;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    PlaneShare shares[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    uint64_t step = total / (uint64_t)num_threads;
    for (int t = 0; t < num_threads; t++) {
        uint64_t end = t + 1 == num_threads ? total : step * (uint64_t)(t + 1);
        shares[t] = (PlaneShare){&columns, step * (uint64_t)t, end, (uint64_t *)sums.buf, (uint64_t)sums.len / 8, 0, copying, digesting};
        if (t > 0) started[t] = pthread_create(&threads[t], NULL, plane_share_run, &shares[t]) == 0;
    }
    plane_share_run(&shares[0]);
    for (int t = 0; t < num_threads; t++) {
        if (t > 0 && started[t]) pthread_join(threads[t], NULL);
        else if (t > 0) plane_share_run(&shares[t]); /* no thread available: do it here */
        result += shares[t].result;
    }
    Py_END_ALLOW_THREADS
    columns_release(&columns);
    PyBuffer_Release(&sums);
    return PyLong_FromUnsignedLongLong(result);
}

/* All functions take columns, then the number of threads. */
static PyObject *run(PyObject *args, int num_columns, void (*work)(Share *)) {
    PyObject *objects[MAX_COLUMNS];
    if (PyTuple_GET_SIZE(args) != num_columns + 1) {
        PyErr_Format(PyExc_TypeError, "expected %d columns and a number of threads", num_columns);
        return NULL;
    }
    for (int i = 0; i < num_columns; i++) objects[i] = PyTuple_GET_ITEM(args, i);
    int num_threads = (int)PyLong_AsLong(PyTuple_GET_ITEM(args, num_columns));
    if (PyErr_Occurred()) return NULL;
    Columns columns;
    if (columns_get(&columns, objects, num_columns) < 0) return NULL;
    uint64_t result;
    Py_BEGIN_ALLOW_THREADS
    result = run_shares(&columns, num_threads, work, NULL, 0);
    Py_END_ALLOW_THREADS
    columns_release(&columns);
    return PyLong_FromUnsignedLongLong(result);
}

static PyObject *native_copy(PyObject *self, PyObject *args) {
    (void)self;
    return run(args, 3, copy_share);
}

static PyObject *native_digest(PyObject *self, PyObject *args) {
    (void)self;
    return run(args, 3, digest_share);
}

static PyObject *native_copy_digest(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *objects[5], *into;
    int num_threads;
    if (!PyArg_ParseTuple(args, "OOOOOOi:copy_digest", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &into, &num_threads)) return NULL;
    Py_buffer sums;
    if (PyObject_GetBuffer(into, &sums, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return NULL;
    Columns columns;
    if (columns_get(&columns, objects, 5) < 0) {
        PyBuffer_Release(&sums);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    run_shares(&columns, num_threads, copy_digest_share, (uint64_t *)sums.buf, (uint64_t)sums.len / 8);
    Py_END_ALLOW_THREADS
    columns_release(&columns);
    PyBuffer_Release(&sums);
    Py_RETURN_NONE;
}

/* process_vm_writev over many rows: at most 1024 rows and 1 GiB a call, short writes continued. Rows that touch in the
 * other process are one piece there: the kernel pins pages by piece. Returns bytes written; stops at the first error,
 * which is stored in *failure. With positions, what was written is digested after every call, which is short enough for
 * the digest to find the bytes in the cache. */
static uint64_t write_rows(pid_t pid, const Columns *columns, uint64_t *digest, int *failure) {
    const uint64_t *dst = columns->column[0], *src = columns->column[1], *length = columns->column[2], *position = digest ? columns->column[3] : NULL;
    const uint64_t bytes_per_call = digest ? CACHED_BYTES : BYTES_PER_CALL;
    const Py_ssize_t num_rows = columns->num_rows;
    struct iovec local[IOVECS_PER_CALL], remote[IOVECS_PER_CALL];
    uint64_t total = 0, done = 0; /* `done` bytes of row i are written */
    Py_ssize_t i = 0;
    while (i < num_rows) {
        int count = 0, pieces = 0;
        uint64_t wanted = 0;
        for (Py_ssize_t j = i; j < num_rows && count < IOVECS_PER_CALL && wanted < bytes_per_call; j++) {
            uint64_t skip = j == i ? done : 0;
            uint64_t size = length[j] - skip;
            if (size > bytes_per_call - wanted) size = bytes_per_call - wanted;
            local[count] = (struct iovec){(void *)(uintptr_t)(src[j] + skip), (size_t)size};
            char *into = (char *)(uintptr_t)(dst[j] + skip);
            if (pieces > 0 && (char *)remote[pieces - 1].iov_base + remote[pieces - 1].iov_len == into) remote[pieces - 1].iov_len += (size_t)size;
            else remote[pieces++] = (struct iovec){into, (size_t)size};
            wanted += size, count++;
        }
        if (wanted == 0) break; /* only empty rows are left */
        ssize_t written = process_vm_writev(pid, local, (unsigned long)count, remote, (unsigned long)pieces, 0);
        if (written <= 0) {
            *failure = written < 0 ? errno : EIO;
            return total;
        }
        total += (uint64_t)written;
        for (uint64_t left = (uint64_t)written; i < num_rows && (left > 0 || length[i] == done);) {
            uint64_t size = length[i] - done < left ? length[i] - done : left;
            if (digest) *digest += digest_run(0, NULL, (const unsigned char *)(uintptr_t)(src[i] + done), size, position[i] + done, read_on, write_on);
            left -= size, done += size;
            if (done == length[i]) i++, done = 0;
        }
    }
    return total;
}

static PyObject *native_write_process(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *objects[4] = {NULL, NULL, NULL, NULL};
    int pid;
    if (!PyArg_ParseTuple(args, "iOOO|O:write_process", &pid, &objects[0], &objects[1], &objects[2], &objects[3])) return NULL;
    Columns columns;
    if (columns_get(&columns, objects, objects[3] ? 4 : 3) < 0) return NULL;
    int failure = 0;
    uint64_t total, digest = 0;
    Py_BEGIN_ALLOW_THREADS
    total = write_rows((pid_t)pid, &columns, objects[3] ? &digest : NULL, &failure);
    Py_END_ALLOW_THREADS
    columns_release(&columns);
    if (failure) {
        errno = failure;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLongLong(objects[3] ? digest : total);
}

/* Arrival cells live in memory shared by the writer and its receiver: {tag, bytes}, one writer each. The writer publishes
 * after its copies (release); the reader sees the copies when it sees the bytes (acquire). */
static PyObject *native_publish(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address, tag, num_bytes;
    if (!PyArg_ParseTuple(args, "KKK:publish", &address, &tag, &num_bytes)) return NULL;
    uint64_t *cell = (uint64_t *)(uintptr_t)address;
    if (__atomic_load_n(&cell[0], __ATOMIC_RELAXED) != tag) {
        __atomic_store_n(&cell[1], 0, __ATOMIC_RELEASE);
        __atomic_store_n(&cell[0], tag, __ATOMIC_RELEASE);
    }
    __atomic_fetch_add(&cell[1], num_bytes, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyObject *native_arrived(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address, num_cells, tag, total = 0;
    if (!PyArg_ParseTuple(args, "KKK:arrived", &address, &num_cells, &tag)) return NULL;
    const uint64_t *cell = (const uint64_t *)(uintptr_t)address;
    for (unsigned long long i = 0; i < num_cells; i++, cell += 2) {
        if (__atomic_load_n(&cell[0], __ATOMIC_ACQUIRE) != tag) continue;
        uint64_t num_bytes = __atomic_load_n(&cell[1], __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&cell[0], __ATOMIC_ACQUIRE) == tag) total += num_bytes;
    }
    return PyLong_FromUnsignedLongLong(total);
}

static PyMethodDef methods[] = {
    {"publish", native_publish, METH_VARARGS, "publish(cell address, tag, bytes): count bytes as arrived"},
    {"arrived", native_arrived, METH_VARARGS, "arrived(cells address, number of cells, tag) -> bytes"},
    {"copy", native_copy, METH_VARARGS, "copy(dst, src, length, num_threads) -> bytes copied"},
    {"digest", native_digest, METH_VARARGS, "digest(address, position, length, num_threads) -> 64-bit sum"},
    {"copy_digest", native_copy_digest, METH_VARARGS, "copy_digest(dst, src, position, group, length, sums, num_threads): adds to sums[group]"},
    {"walk_planes", native_walk_planes, METH_VARARGS, "walk_planes(columns, sums, copying, num_threads) -> bytes walked"},
    {"write_process", native_write_process, METH_VARARGS, "write_process(pid, dst, src, length[, position]) -> bytes written, or with positions their digest"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "weft._native", "Batched memory work.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    make_weights();
    return PyModule_Create(&module);
}
