/* The moves of `solvers.metropolis`, the steps of `solvers.local` and the live bytes of `solvers.live`, in C: the same
   ones, many times as fast.

   What they do, and why, is said there and in `solvers.descent` and `solvers.unneeded`; functions have the names that
   they have there. The two agree move by move (`tests/test_compiled.py`). It calls nothing of Python:
   `solvers.compiled` hands over one array of sections, each of them its length and its numbers, which must outlive the
   walk. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TRIES 20
#define LONGEST 12
#define WORST 5.0
#define TIGHT 0.98
#define WITH_ITS_OWN 0.5

#define TOLERANCE 0.02
#define SUSPECTS 400
#define MOST_VICTIMS 60
#define PROMISING 48
#define STALL_LIMIT 60
#define OVERTAKEN 2.0
#define SKIPPED 0.15

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

typedef int64_t i64;

typedef struct { const i64 *at; i64 size; } Section;
typedef struct { const i64 *starts, *data; } Lists; /* one list for each op */
typedef struct { i64 *at, size, room; } Array;      /* sorted, but for `recomputes`, `best` and `listed` */
typedef struct { i64 sign, slot, op; } Change;
typedef struct { Change *at; i64 size, room; } Move;
typedef struct { double score; i64 item; } Ranked;
typedef struct { i64 slot, gain, cost; } Eviction; /* its ops are `chosen` */
typedef struct { double keep_ratio, noise; } Taste;

typedef struct {
    i64 n, m, stride, room, unit, is_large;
    Section producer, bytes, pinned, cost, alloc, recomputable, candidates;
    Lists outputs, replays, reuse, optionals, replayers;
    Array *events, *items, *slots_of; /* of each tensor, slot, op */
    i64 *total, *relative, *old_total, *old_relative, *optional_slot, *mark;
    Array dirty, tight, chosen, stack, reads;
    i64 stamp, added_cost;
    int undoing;
    Array recomputes, best;    /* keys of recomputes, slot * stride + op */
    i64 *place, places;        /* open addressing: where a key stands in `recomputes`, -1 where nothing does */
    i64 best_cost;
    double op_cost, tensor_bytes;
    uint64_t random;
    Move move;
    i64 *seen, seen_stamp;     /* ops of an eviction */
    Move journal;              /* of a step of local search */
    Array listed;              /* recomputes that it looks at */
} Walk;

/* Memory and small arrays ------------------------------------------------------------------------------------------ */

static void *resized(void *at, i64 bytes) {
    void *there = realloc(at, (size_t)(bytes > 0 ? bytes : 1));
    if (!there) abort();
    return there;
}

static i64 *numbers(const i64 *from, i64 size) {
    i64 *to = resized(NULL, size * (i64)sizeof(i64));
    if (from) memcpy(to, from, (size_t)size * sizeof(i64));
    return to;
}

static void push(Array *a, i64 x) {
    if (a->size == a->room) {
        a->room = 2 * a->room + 4;
        a->at = resized(a->at, a->room * (i64)sizeof(i64));
    }
    a->at[a->size++] = x;
}

static void copy_to(Array *to, const Array *from) {
    to->size = 0;
    if (to->room < from->size) {
        to->room = from->size;
        to->at = resized(to->at, to->room * (i64)sizeof(i64));
    }
    if (from->size) memcpy(to->at, from->at, (size_t)from->size * sizeof(i64));
    to->size = from->size;
}

static i64 bisect_left(const Array *a, i64 x) {
    i64 low = 0, high = a->size;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (a->at[middle] < x) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void insert_at(Array *a, i64 j, i64 x) {
    push(a, x);
    memmove(a->at + j + 1, a->at + j, (size_t)(a->size - 1 - j) * sizeof(i64));
    a->at[j] = x;
}

static void delete_at(Array *a, i64 j) {
    memmove(a->at + j, a->at + j + 1, (size_t)(a->size - 1 - j) * sizeof(i64));
    a->size--;
}

static int holds(const Array *a, i64 x) {
    i64 j = bisect_left(a, x);
    return j < a->size && a->at[j] == x;
}

static int contains(const Array *a, i64 x) { /* not sorted */
    for (i64 j = 0; j < a->size; j++) if (a->at[j] == x) return 1;
    return 0;
}

/* Random numbers: SplitMix64 (Steele, Lea, Flood 2014) -------------------------------------------------------------- */

static double drawn(Walk *w) {
    uint64_t z = (w->random += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static i64 below(Walk *w, i64 count) { return (i64)(drawn(w) * (double)count); }

/* Live bytes (`solvers.live`) --------------------------------------------------------------------------------------- */

#define EACH(t, lists, op) \
    for (const i64 *t = (lists).data + (lists).starts[op], *t##_end = (lists).data + (lists).starts[(op) + 1]; t < t##_end; t++)

static i64 key(const Walk *w, i64 slot, i64 op) { return slot * w->stride + op; }
static i64 slot_of(const Walk *w, i64 event) { return (event >> 1) / w->stride; }
static int has(const Walk *w, i64 slot, i64 op) { return holds(&w->slots_of[op], slot); }
static int is_write(const Array *events, i64 j) { return (int)(events->at[j] & 1); }

static void touch(Walk *w, i64 slot) {
    if (w->mark[slot] != w->stamp) {
        w->mark[slot] = w->stamp;
        push(&w->dirty, slot);
    }
}

static void raise_total(Walk *w, i64 first, i64 end, i64 delta) {
    for (i64 s = first; s < end; s++) w->total[s] += delta;
}

static void shift_event(Walk *w, i64 t, const Array *events, i64 j, i64 event, i64 sign) {
    i64 slot = slot_of(w, event), bytes = w->bytes.at[t];
    int pinned = w->pinned.at[t] != 0;
    if (j == 0) {
        i64 end = pinned ? w->n : (events->size ? slot_of(w, events->at[0]) + 1 : slot + 1);
        raise_total(w, slot + 1, end, sign * bytes);
        return;
    }
    int was_live = j < events->size && !is_write(events, j), now_live = !(event & 1);
    if (was_live == now_live || pinned) return;
    i64 before = slot_of(w, events->at[j - 1]);
    touch(w, before);
    raise_total(w, before + 1, slot + 1, now_live ? sign * bytes : -sign * bytes);
}

static void insert_event(Walk *w, i64 t, i64 event) {
    Array *events = &w->events[t];
    i64 j = bisect_left(events, event);
    if (!w->undoing) shift_event(w, t, events, j, event, 1);
    insert_at(events, j, event);
}

static void delete_event(Walk *w, i64 t, i64 event) {
    Array *events = &w->events[t];
    i64 j = bisect_left(events, event);
    delete_at(events, j);
    if (!w->undoing) shift_event(w, t, events, j, event, -1);
}

static void place(Walk *w, i64 slot, i64 op, int reads) {
    i64 event = 2 * key(w, slot, op);
    insert_at(&w->items[slot], bisect_left(&w->items[slot], op), op);
    touch(w, slot);
    if (reads) EACH(t, w->replays, op) insert_event(w, *t, event);
    EACH(t, w->outputs, op) insert_event(w, *t, event + 1);
}

static void displace(Walk *w, i64 slot, i64 op, int reads) {
    i64 event = 2 * key(w, slot, op);
    delete_at(&w->items[slot], bisect_left(&w->items[slot], op));
    touch(w, slot);
    if (reads) EACH(t, w->replays, op) delete_event(w, *t, event);
    EACH(t, w->outputs, op) delete_event(w, *t, event + 1);
}

static void refresh_optional(Walk *w, i64 op) {
    EACH(p, w->optionals, op) {
        i64 wanted = -1, current = w->optional_slot[*p];
        EACH(i, w->replayers, *p) {
            if (w->slots_of[*i].size) {
                wanted = *i;
                break;
            }
        }
        if (wanted == current) continue;
        if (current >= 0) displace(w, current, *p, 0);
        if (wanted >= 0) place(w, wanted, *p, 0);
        w->optional_slot[*p] = wanted;
    }
}

static void change(Walk *w, i64 sign, i64 slot, i64 op) { /* `add` and `remove` */
    Array *slots = &w->slots_of[op];
    i64 j = bisect_left(slots, slot);
    w->added_cost += sign * w->cost.at[op];
    if (sign > 0) {
        insert_at(slots, j, slot);
        place(w, slot, op, 1);
    } else {
        delete_at(slots, j);
        displace(w, slot, op, 1);
    }
    refresh_optional(w, op);
}

static int is_last_read(const Walk *w, i64 t, i64 event) {
    const Array *events = &w->events[t];
    i64 j = bisect_left(events, event);
    return !w->pinned.at[t] && (j + 1 == events->size || is_write(events, j + 1));
}

static i64 needs(const Walk *w, i64 event, i64 op) {
    if (w->reuse.starts[op + 1] == w->reuse.starts[op]) return w->alloc.at[op];
    i64 written = w->outputs.data[w->outputs.starts[op]];
    if (w->pinned.at[written] && w->events[written].at[0] < event) return w->alloc.at[op];
    EACH(t, w->reuse, op) if (is_last_read(w, *t, event)) return w->alloc.at[op] - w->bytes.at[written];
    return w->alloc.at[op];
}

static i64 resident(const Walk *w, i64 event, i64 op) { /* `_change` */
    i64 bytes = 0;
    EACH(t, w->outputs, op) {
        const Array *events = &w->events[*t];
        i64 j = bisect_left(events, event + 1);
        if (w->pinned.at[*t]) bytes += j == 0 ? w->bytes.at[*t] : 0;
        else if (j + 1 < events->size && !is_write(events, j + 1)) bytes += w->bytes.at[*t];
    }
    EACH(t, w->replays, op) if (is_last_read(w, *t, event)) bytes -= w->bytes.at[*t];
    return bytes;
}

/* Bytes of a slot's worst moment above what is live when it begins, and the op that runs then. */
static i64 worst_moment(const Walk *w, i64 slot, i64 *at) {
    const Array *items = &w->items[slot];
    i64 current = 0, worst = 0;
    *at = slot;
    for (i64 j = 0; j < items->size; j++) {
        i64 op = items->at[j], event = 2 * key(w, slot, op), moment = current + needs(w, event, op);
        if (j == 0 || moment > worst) worst = moment, *at = op;
        if (j + 1 < items->size) current += resident(w, event, op);
    }
    return worst;
}

static void make(Walk *w, const Change *changes, i64 count) { /* slots are looked at again only at the end */
    w->dirty.size = 0;
    w->stamp++;
    for (i64 k = 0; k < count; k++) change(w, changes[k].sign, changes[k].slot, changes[k].op);
    for (i64 k = 0; k < w->dirty.size; k++) {
        i64 slot = w->dirty.at[k], at, worst = worst_moment(w, slot, &at);
        w->total[slot] += worst - w->relative[slot];
        w->relative[slot] = worst;
    }
}

static void apply(Walk *w) {
    size_t bytes = (size_t)w->n * sizeof(i64);
    memcpy(w->old_total, w->total, bytes);
    memcpy(w->old_relative, w->relative, bytes);
    make(w, w->move.at, w->move.size);
}

static void take_back(Walk *w) {
    i64 *total = w->total, *relative = w->relative;
    w->undoing = 1;
    for (i64 k = w->move.size - 1; k >= 0; k--) change(w, -w->move.at[k].sign, w->move.at[k].slot, w->move.at[k].op);
    w->undoing = 0;
    w->total = w->old_total, w->old_total = total;
    w->relative = w->old_relative, w->old_relative = relative;
}

static int is_live(const Walk *w, i64 t, i64 moment) {
    const Array *events = &w->events[t];
    i64 j = bisect_left(events, 2 * moment);
    return j > 0 && (w->pinned.at[t] || (j < events->size && !is_write(events, j)));
}

/* The set of recomputes (`_Recomputes`) ----------------------------------------------------------------------------- */

static i64 bucket(const Walk *w, i64 of) {
    uint64_t hash = (uint64_t)of * 0x9E3779B97F4A7C15u;
    i64 at = (i64)(hash >> 20) & (w->places - 1);
    while (w->place[at] >= 0 && w->recomputes.at[w->place[at]] != of) at = (at + 1) & (w->places - 1);
    return at;
}

static void rehash(Walk *w, i64 places) {
    w->places = places;
    w->place = resized(w->place, places * (i64)sizeof(i64));
    memset(w->place, 0xFF, (size_t)places * sizeof(i64));
    for (i64 j = 0; j < w->recomputes.size; j++) w->place[bucket(w, w->recomputes.at[j])] = j;
}

static void take_in(Walk *w, i64 of) {
    if (2 * (w->recomputes.size + 1) > w->places) rehash(w, 2 * w->places);
    i64 at = bucket(w, of);
    w->place[at] = w->recomputes.size;
    push(&w->recomputes, of);
}

static void leave_out(Walk *w, i64 of) { /* the last takes its place */
    i64 hole = bucket(w, of), j = w->place[hole], last = w->recomputes.at[w->recomputes.size - 1];
    w->place[bucket(w, last)] = j;
    w->recomputes.at[j] = last;
    w->recomputes.size--;
    w->place[hole] = -1;
    for (i64 at = (hole + 1) & (w->places - 1); w->place[at] >= 0; at = (at + 1) & (w->places - 1)) {
        i64 entry = w->place[at]; /* may have been pushed on by what left */
        w->place[at] = -1;
        w->place[bucket(w, w->recomputes.at[entry])] = entry;
    }
}

/* Moves (`_Walk`) --------------------------------------------------------------------------------------------------- */

static void note(Move *move, i64 sign, i64 slot, i64 op) {
    if (move->size == move->room) {
        move->room = 2 * move->room + 16;
        move->at = resized(move->at, move->room * (i64)sizeof(Change));
    }
    move->at[move->size++] = (Change){sign, slot, op};
}

static void propose(Walk *w, i64 sign, i64 slot, i64 op) { note(&w->move, sign, slot, op); }

static void chain(Walk *w, i64 slot, i64 op) {
    double share = 0.7 * drawn(w);
    Array *chosen = &w->chosen, *stack = &w->stack;
    chosen->size = stack->size = 0;
    push(stack, op);
    while (stack->size) {
        i64 i = stack->at[--stack->size];
        if (holds(chosen, i) || has(w, slot, i)) continue;
        insert_at(chosen, bisect_left(chosen, i), i);
        if (chosen->size > LONGEST) {
            propose(w, 1, slot, op);
            return;
        }
        i64 moment = key(w, slot, i);
        EACH(t, w->replays, i) {
            i64 p = w->producer.at[*t];
            if (w->recomputable.at[p] && !w->pinned.at[*t] && !is_live(w, *t, moment) && drawn(w) < share) push(stack, p);
        }
    }
    for (i64 k = 0; k < chosen->size; k++) propose(w, 1, slot, chosen->at[k]);
}

static void addition(Walk *w, i64 near) {
    for (int tries = 0; tries < TRIES; tries++) {
        i64 t = w->candidates.at[below(w, w->candidates.size)];
        const Array *events = &w->events[t];
        if (events->size < 2) continue;
        i64 j = near < 0 ? 1 + below(w, events->size - 1) : bisect_left(events, 2 * key(w, near, 0));
        if (j == 0 || j == events->size || is_write(events, j)) continue;
        i64 before = slot_of(w, events->at[j - 1]), slot = slot_of(w, events->at[j]), op = w->producer.at[t];
        if (slot - before < 2 || op >= slot || has(w, slot, op)) continue;
        if (drawn(w) < 0.5) chain(w, slot, op);
        else propose(w, 1, slot, op);
        return;
    }
}

static int is_read(const Walk *w, i64 slot, i64 op) { /* but for `reads` */
    i64 written = 2 * key(w, slot, op) + 1;
    EACH(t, w->outputs, op) {
        const Array *events = &w->events[*t];
        i64 j = bisect_left(events, written) + 1;
        while (j < events->size && contains(&w->reads, events->at[j])) j++;
        if (j < events->size && !is_write(events, j)) return 1;
    }
    return 0;
}

static void own(Walk *w, i64 slot, i64 op) { /* into `chosen` */
    Array *found = &w->chosen, *stack = &w->stack;
    found->size = stack->size = w->reads.size = 0;
    push(found, op);
    push(stack, op);
    push(&w->reads, 2 * key(w, slot, op));
    while (stack->size) {
        i64 i = stack->at[--stack->size];
        EACH(t, w->replays, i) {
            i64 p = w->producer.at[*t];
            if (!contains(found, p) && has(w, slot, p) && !is_read(w, slot, p)) {
                push(found, p);
                push(stack, p);
                push(&w->reads, 2 * key(w, slot, p));
            }
        }
    }
}

static void shift(Walk *w, i64 slot, i64 op) {
    static const i64 steps[6] = {-3, -2, -1, 1, 2, 3};
    const Array *events = &w->events[w->outputs.data[w->outputs.starts[op]]];
    i64 j = bisect_left(events, 2 * key(w, slot, op) + 1), first = op + 1, last = slot;
    if (j && slot_of(w, events->at[j - 1]) > first) first = slot_of(w, events->at[j - 1]);
    if (j + 1 < events->size) last = slot_of(w, events->at[j + 1]);
    if (last <= first) return;
    i64 far = drawn(w) < 0.5 ? first + below(w, last - first + 1) : slot + steps[below(w, 6)];
    i64 there = far < first ? first : far > last ? last : far;
    if (there == slot || !w->items[there].size || has(w, there, op)) return;
    if (drawn(w) < WITH_ITS_OWN) own(w, slot, op);
    else w->chosen.size = 0, push(&w->chosen, op);
    for (i64 k = 0; k < w->chosen.size; k++) propose(w, -1, slot, w->chosen.at[k]);
    for (i64 k = 0; k < w->chosen.size; k++) {
        i64 i = w->chosen.at[k];
        if (i < there && !has(w, there, i)) propose(w, 1, there, i);
    }
}

static void draw(Walk *w) {
    double kind = drawn(w);
    w->move.size = 0;
    if (kind < 0.5) {
        addition(w, kind < 0.35 && w->tight.size ? w->tight.at[below(w, w->tight.size)] : -1);
        return;
    }
    if (!w->recomputes.size) return;
    i64 of = w->recomputes.at[below(w, w->recomputes.size)], slot = of / w->stride, op = of % w->stride;
    if (kind >= 0.75) {
        shift(w, slot, op);
        return;
    }
    own(w, slot, op);
    for (i64 k = 0; k < w->chosen.size; k++) propose(w, -1, slot, w->chosen.at[k]);
}

static double excess(const Walk *w) {
    i64 sum = 0, worst = 0;
    for (i64 s = 0; s < w->n; s++) {
        i64 over = w->total[s] - w->room;
        over = over > 0 ? over : 0;
        sum += over;
        worst = over > worst ? over : worst;
    }
    return worst > 0 ? ((double)sum + WORST * (double)worst) / w->tensor_bytes : 0.0;
}

/* Local search (`solvers.local`, `solvers.descent`, `solvers.unneeded`) --------------------------------------------- */

static void act(Walk *w, i64 sign, i64 slot, i64 op) {
    note(&w->journal, sign, slot, op);
    make(w, &(Change){sign, slot, op}, 1);
}

static void add(Walk *w, i64 slot, i64 op) { act(w, 1, slot, op); }
static void take_away(Walk *w, i64 slot, i64 op) { act(w, -1, slot, op); } /* `remove` */

static void rollback(Walk *w, i64 mark) {
    while (w->journal.size > mark) {
        Change last = w->journal.at[--w->journal.size];
        last.sign = -last.sign;
        make(w, &last, 1);
    }
}

static i64 worst_slot(const Walk *w) {
    i64 worst = 0;
    for (i64 s = 1; s < w->n; s++) if (w->total[s] > w->total[worst]) worst = s;
    return worst;
}

static i64 peak(const Walk *w) { /* without the static bytes */
    i64 highest = w->n ? w->total[worst_slot(w)] : 0;
    return highest > 0 ? highest : 0;
}

static i64 worst_key(const Walk *w, i64 slot) {
    i64 at;
    worst_moment(w, slot, &at);
    return key(w, slot, at);
}

static void list_recomputes(const Walk *w, Array *to) { /* by slot, then by op */
    to->size = 0;
    for (i64 slot = 0; slot < w->n; slot++) {
        const Array *items = &w->items[slot];
        for (i64 j = 0; j < items->size; j++) {
            if (items->at[j] != slot && w->optional_slot[items->at[j]] < 0) push(to, key(w, slot, items->at[j]));
        }
    }
}

static int spans(const Walk *w, i64 t, i64 at, i64 moment) {
    const Array *events = &w->events[t];
    if (w->pinned.at[t] || events->at[events->size - 1] < 2 * moment) return 0;
    i64 j = bisect_left(events, 2 * moment);
    return !is_write(events, j) && j > 0 && events->at[j - 1] < 2 * at;
}

static i64 event_before(const Walk *w, i64 t, i64 moment) {
    const Array *events = &w->events[t];
    i64 j = bisect_left(events, 2 * moment);
    return j ? events->at[j - 1] : -1;
}

static int plan_eviction(Walk *w, i64 tensor, i64 at, double keep_ratio, double cost_limit, Eviction *found) {
    const Array *events = &w->events[tensor];
    Array *chosen = &w->chosen, *stack = &w->stack;
    i64 after = bisect_left(events, 2 * (at + 1)), gain = 0, cost = 0;
    if (after == events->size || is_write(events, after)) return 0;
    i64 slot = slot_of(w, events->at[after]);
    double limit = (double)w->bytes.at[tensor] * keep_ratio;
    w->seen_stamp++;
    chosen->size = stack->size = 0;
    push(stack, w->producer.at[tensor]);
    while (stack->size) {
        i64 i = stack->at[--stack->size], moment = key(w, slot, i);
        if (w->seen[i] == w->seen_stamp || has(w, slot, i)) continue;
        if (moment <= at) return 0;
        w->seen[i] = w->seen_stamp;
        push(chosen, i);
        cost += w->cost.at[i];
        if ((double)cost > cost_limit) return 0;
        EACH(t, w->outputs, i) if (spans(w, *t, at, moment)) gain += w->bytes.at[*t];
        EACH(t, w->replays, i) {
            i64 p = w->producer.at[*t];
            if (is_live(w, *t, moment)) continue;
            if ((double)w->bytes.at[*t] > limit && w->recomputable.at[p]) push(stack, p);
            else if (w->events[*t].size && event_before(w, *t, moment) < 2 * at) gain -= w->bytes.at[*t];
        }
    }
    *found = (Eviction){slot, gain > 0 ? gain / w->unit : 0, cost};
    return gain > 0;
}

static int by_number(const void *a, const void *b) {
    i64 x = *(const i64 *)a, y = *(const i64 *)b;
    return (x > y) - (x < y);
}

static int by_score(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? -1 : 1;
    return (x->item > y->item) - (x->item < y->item);
}

static double score(const Eviction *eviction) { return (double)eviction->cost / (double)eviction->gain; }

static int is_held_across(const Walk *w, i64 t, i64 at) {
    const Array *events = &w->events[t];
    i64 event = 2 * at;
    if (!events->size || events->at[0] >= event || event >= events->at[events->size - 1]) return 0;
    i64 j = bisect_left(events, event);
    return !is_write(events, j) && events->at[j] != event;
}

static i64 rank(Walk *w, i64 at, Taste taste, double cost_limit, Ranked *queue) { /* `_ranked` */
    i64 part[PROMISING], size = 0, next = 0;
    Eviction found;
    while (!size && next < w->candidates.size) {
        i64 count = 0;
        while (count < PROMISING && next < w->candidates.size) {
            i64 t = w->candidates.at[next++];
            if (!is_held_across(w, t, at)) continue;
            if (taste.noise > 0 && drawn(w) <= SKIPPED * taste.noise) continue;
            part[count++] = t;
        }
        for (i64 k = 0; k < count; k++) {
            if (!plan_eviction(w, part[k], at, taste.keep_ratio, cost_limit - (double)w->added_cost, &found)) continue;
            double blur = taste.noise > 0 ? 1.0 + taste.noise * drawn(w) : 1.0;
            queue[size++] = (Ranked){score(&found) * blur, part[k]};
        }
    }
    qsort(queue, (size_t)size, sizeof(Ranked), by_score);
    return size;
}

/* The smallest peak of a descent so far, and the length of the journal there. */
typedef struct { i64 best_peak, best_length; } Descent;

static int relieve(Walk *w, Descent *descent, Taste taste, double cost_limit) {
    Ranked queue[PROMISING];
    i64 slot = worst_slot(w), at = worst_key(w, slot), target = w->room, size = rank(w, at, taste, cost_limit, queue);
    int applied = 0;
    Eviction found;
    if (!w->is_large) {
        for (i64 s = 0; s < w->n; s++) if (s != slot && w->total[s] > target) target = w->total[s];
    }
    for (i64 k = 0; k < size; k++) {
        double following = k + 1 < size ? queue[k + 1].score : INFINITY;
        if (!plan_eviction(w, queue[k].item, at, taste.keep_ratio, cost_limit - (double)w->added_cost, &found)) continue;
        if (applied && score(&found) > OVERTAKEN * following) continue;
        if (applied && score(&found) > OVERTAKEN * queue[0].score + 1e-9) break;
        qsort(w->chosen.at, (size_t)w->chosen.size, sizeof(i64), by_number);
        for (i64 j = 0; j < w->chosen.size; j++) add(w, found.slot, w->chosen.at[j]);
        applied = 1;
        i64 now = peak(w);
        if (now < descent->best_peak) *descent = (Descent){now, w->journal.size};
        if (w->total[slot] <= target || (!w->is_large && worst_slot(w) != slot)) break;
    }
    return applied;
}

static int descend(Walk *w, Taste taste, double cost_limit) {
    Descent descent = {peak(w), w->journal.size};
    i64 stalled = 0;
    while (peak(w) > w->room && stalled < STALL_LIMIT && (double)w->added_cost <= cost_limit) {
        i64 before = descent.best_peak;
        if (!relieve(w, &descent, taste, cost_limit)) break;
        stalled = descent.best_peak < before ? 0 : stalled + 1;
    }
    rollback(w, descent.best_length);
    return peak(w) <= w->room;
}

static int is_dead(const Walk *w, i64 slot, i64 op) {
    i64 after = 2 * (key(w, slot, op) + 1);
    EACH(t, w->outputs, op) {
        const Array *events = &w->events[*t];
        i64 j = bisect_left(events, after);
        if (j < events->size && !is_write(events, j)) return 0;
    }
    return 1;
}

static void drop_dead(Walk *w, i64 op, i64 slot) {
    Array *stack = &w->stack;
    stack->size = 0;
    EACH(t, w->replays, op) push(stack, w->producer.at[*t]);
    while (stack->size) {
        i64 i = stack->at[--stack->size];
        for (i64 j = 0; j < w->slots_of[i].size;) {
            i64 s = w->slots_of[i].at[j];
            if (s > slot) break;
            if (!is_dead(w, s, i)) {
                j++;
                continue;
            }
            take_away(w, s, i);
            EACH(t, w->replays, i) push(stack, w->producer.at[*t]);
        }
    }
}

static void draw_some(Walk *w, Array *from, i64 count) { /* come to stand first */
    for (i64 k = 0; k < count; k++) {
        i64 j = k + below(w, from->size - k), other = from->at[k];
        from->at[k] = from->at[j];
        from->at[j] = other;
    }
}

/* Numbers sorted by another number of each: that is put before them, and taken off again. */
static void sort_by(Array *numbers, i64 (*first)(const Walk *, i64, i64), const Walk *w, i64 with) {
    i64 size = numbers->size;
    Ranked *pairs = resized(NULL, size * (i64)sizeof(Ranked));
    for (i64 k = 0; k < size; k++) pairs[k] = (Ranked){(double)first(w, numbers->at[k], with), numbers->at[k]};
    qsort(pairs, (size_t)size, sizeof(Ranked), by_score);
    for (i64 k = 0; k < size; k++) numbers->at[k] = pairs[k].item;
    free(pairs);
}

static i64 dearest(const Walk *w, i64 of, i64 with) { return (void)with, -w->cost.at[of % w->stride]; }
static i64 apart(i64 a, i64 b) { return a > b ? a - b : b - a; }
static i64 slots_apart(const Walk *w, i64 of, i64 with) { return apart(of / w->stride, with / w->stride); }
static i64 ops_apart(const Walk *w, i64 of, i64 with) { return apart(of % w->stride, with % w->stride); }

static void drop_among(Walk *w, Array *suspects) {
    sort_by(suspects, dearest, w, 0);
    for (i64 k = 0; k < suspects->size; k++) {
        i64 slot = suspects->at[k] / w->stride, op = suspects->at[k] % w->stride, mark = w->journal.size;
        if (!has(w, slot, op)) continue;
        take_away(w, slot, op);
        if (peak(w) > w->room) rollback(w, mark);
        else drop_dead(w, op, slot);
    }
}

static void list_suspects(Walk *w) { /* into `listed` */
    list_recomputes(w, &w->listed);
    if (w->listed.size <= SUSPECTS) return;
    draw_some(w, &w->listed, SUSPECTS);
    w->listed.size = SUSPECTS;
    for (i64 k = 0; k < w->journal.size; k++) {
        Change made = w->journal.at[k];
        if (made.sign > 0 && has(w, made.slot, made.op)) push(&w->listed, key(w, made.slot, made.op));
    }
}

static void choose_victims(Walk *w) { /* into `listed` */
    Array *victims = &w->listed;
    list_recomputes(w, victims);
    if (!victims->size) return;
    double random = drawn(w);
    i64 most = victims->size < MOST_VICTIMS ? victims->size : MOST_VICTIMS;
    i64 size = 1 + (i64)(random * random * random * (double)most);
    i64 near = victims->at[below(w, victims->size)], how = below(w, 3);
    if (how == 2) draw_some(w, victims, size);
    else sort_by(victims, how == 0 ? slots_apart : ops_apart, w, near);
    victims->size = size;
}

static void ruin_and_repair(Walk *w, double cost_limit) {
    static const double keep_ratios[3] = {0.3, 1.0, 0.0}, noises[3] = {0.0, 0.5, 2.0};
    w->journal.size = 0;
    choose_victims(w);
    for (i64 k = 0; k < w->listed.size; k++) {
        i64 slot = w->listed.at[k] / w->stride, op = w->listed.at[k] % w->stride;
        if (!has(w, slot, op)) continue;
        take_away(w, slot, op);
        drop_dead(w, op, slot);
    }
    Taste taste = {keep_ratios[below(w, 3)], 0.0};
    taste.noise = noises[below(w, 3)];
    int fits = descend(w, taste, 1.3 * cost_limit);
    if (fits) {
        list_suspects(w);
        drop_among(w, &w->listed);
    }
    if (!fits || (double)w->added_cost > cost_limit) rollback(w, 0);
}

/* What `solvers.compiled` calls ------------------------------------------------------------------------------------- */

static Section section(const i64 **cursor) {
    Section found = {*cursor + 1, **cursor};
    *cursor += 1 + found.size;
    return found;
}

static Lists lists(const i64 **cursor) {
    Section starts = section(cursor), data = section(cursor);
    return (Lists){starts.at, data.at};
}

static Array *arrays(const i64 **cursor, i64 count) {
    Lists from = lists(cursor);
    Array *to = resized(NULL, count * (i64)sizeof(Array));
    for (i64 k = 0; k < count; k++) {
        i64 size = from.starts[k + 1] - from.starts[k];
        to[k] = (Array){numbers(from.data + from.starts[k], size), size, size};
    }
    return to;
}

EXPORT i64 walk_version(void) { return 2; }

EXPORT Walk *walk_new(const i64 *sections, double op_cost, double tensor_bytes) {
    const i64 *cursor = sections;
    Walk *w = calloc(1, sizeof(Walk));
    if (!w) abort();
    Section sizes = section(&cursor);
    w->n = sizes.at[0], w->m = sizes.at[1], w->room = sizes.at[2], w->random = (uint64_t)sizes.at[3];
    w->added_cost = sizes.at[4], w->unit = sizes.at[5], w->is_large = sizes.at[6];
    w->stride = w->n + 1;
    w->op_cost = op_cost, w->tensor_bytes = tensor_bytes;
    w->producer = section(&cursor), w->bytes = section(&cursor), w->pinned = section(&cursor);
    w->cost = section(&cursor), w->alloc = section(&cursor), w->recomputable = section(&cursor);
    w->candidates = section(&cursor);
    w->outputs = lists(&cursor), w->replays = lists(&cursor), w->reuse = lists(&cursor);
    w->optionals = lists(&cursor), w->replayers = lists(&cursor);
    w->events = arrays(&cursor, w->m), w->items = arrays(&cursor, w->n), w->slots_of = arrays(&cursor, w->n);
    w->total = numbers(section(&cursor).at, w->n), w->relative = numbers(section(&cursor).at, w->n);
    w->optional_slot = numbers(section(&cursor).at, w->n);
    w->old_total = numbers(NULL, w->n), w->old_relative = numbers(NULL, w->n);
    w->mark = numbers(NULL, w->n), w->seen = numbers(NULL, w->n);
    for (i64 i = 0; i < w->n; i++) w->mark[i] = w->seen[i] = 0;
    Section known = section(&cursor);
    rehash(w, 64);
    for (i64 k = 0; k < known.size; k++) take_in(w, known.at[k]);
    w->best_cost = -1;
    return w;
}

EXPORT void walk_end(Walk *w) {
    for (i64 t = 0; t < w->m; t++) free(w->events[t].at);
    for (i64 i = 0; i < w->n; i++) free(w->items[i].at), free(w->slots_of[i].at);
    void *all[] = {w->events, w->items, w->slots_of, w->total, w->relative, w->old_total, w->old_relative,
                   w->optional_slot, w->mark, w->dirty.at, w->tight.at, w->chosen.at, w->stack.at, w->reads.at,
                   w->recomputes.at, w->best.at, w->place, w->move.at, w->seen, w->journal.at, w->listed.at, w};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
}

/* So many moves at one temperature, with the slots that are tight when they begin. */
EXPORT void walk_moves(Walk *w, i64 moves, double temperature, double weight) {
    double cost = (double)w->added_cost / w->op_cost, over = excess(w);
    w->tight.size = 0;
    for (i64 s = 0; s < w->n; s++) if ((double)w->total[s] > TIGHT * (double)w->room) push(&w->tight, s);
    for (i64 number = 0; number < moves; number++) {
        draw(w);
        if (!w->move.size) continue;
        apply(w);
        double then = (double)w->added_cost / w->op_cost, now = excess(w);
        double worse = then - cost + weight * (now - over);
        if (worse > 0 && drawn(w) >= exp(-worse / temperature)) {
            take_back(w);
            continue;
        }
        cost = then, over = now;
        for (i64 k = 0; k < w->move.size; k++) {
            i64 of = key(w, w->move.at[k].slot, w->move.at[k].op);
            if (w->move.at[k].sign > 0) take_in(w, of);
            else leave_out(w, of);
        }
        if (over == 0 && (w->best_cost < 0 || w->added_cost < w->best_cost)) {
            copy_to(&w->best, &w->recomputes);
            w->best_cost = w->added_cost;
        }
    }
}

/* Steps of local search, of so many in all, from a plan that fits; a walk does either these or moves. Returns 1 where
   the best plan costs the target or there is nothing to take away. */
EXPORT int walk_improve(Walk *w, i64 first, i64 count, i64 steps, i64 target_cost) {
    if (w->best_cost < 0) copy_to(&w->best, &w->recomputes), w->best_cost = w->added_cost;
    for (i64 step = first; step < first + count; step++) {
        if (w->best_cost <= target_cost || !w->best.size) return 1;
        double random = drawn(w);
        double tolerance = TOLERANCE * (double)w->best_cost * (1.0 - (double)step / (double)steps) * random * random;
        ruin_and_repair(w, (double)w->best_cost + tolerance);
        if (w->added_cost >= w->best_cost) continue;
        list_recomputes(w, &w->best);
        w->best_cost = w->added_cost;
    }
    return 0;
}

/* Keys of the recomputes: of the state that the walk is in, or of the cheapest that fits; what fits in `room`. Returns
   how many there are, -1 where none was seen. */
EXPORT i64 walk_recomputes(const Walk *w, int best, i64 *keys, i64 room) {
    const Array *found = best ? &w->best : &w->recomputes;
    if (best && w->best_cost < 0) return -1;
    if (found->size && found->size <= room) memcpy(keys, found->at, (size_t)found->size * sizeof(i64));
    return found->size;
}
