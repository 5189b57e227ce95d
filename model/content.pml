/*
 * Which content of an id the fold of half[s] finds, and which one a caller is told, as in docs/protocol.md.
 * Three owners have the shard one after the other; each may be paused at any step, and its halves may arrive late. Clients
 * prepare one id with content A or B, anywhere and again.
 * `make model` checks it exhaustively; docs/protocol.md says what is modelled.
 *
 * Each of these mutants leaves out one rule of the protocol, and the check must find an error in it:
 *   FIRST_COUNTS   of two prepares the first in the log counts, whoever wrote it
 *   LAST_COUNTS    the last one counts
 *   NOT_READ       an owner answers at once although an earlier prepare of its own was not confirmed
 *   NOT_FINAL      an owner acknowledges a former owner's half that its lane has not written again
 *   DOUBT_DROPPED  a half that is certainly not stored takes the doubt about an earlier one with it
 */
#define OWNERS 3
#ifndef PREPARES
#define PREPARES 4
#endif
#define AGAIN 2                     /* halves that lanes write again */
#define LENGTH (OWNERS + PREPARES + AGAIN)
#define NOTHING 0
#define A 1
#define B 2

mtype = { none, barrier, prepare, again };
typedef Record { mtype kind; byte content; byte writer; };
Record half[LENGTH];
byte length;

typedef Owner {
    bit serves;                     /* so it believes; it may be fenced */
    byte held, writer;              /* the content that it knows, and whose half that is */
    bit final;                      /* the lane has written that half */
    byte tail;
    byte flight;                    /* bit mask: contents on their way to the log */
    byte stores;                    /* the content whose answer a caller waits for */
    byte at;                        /* where it is in the log, and 1 */
    bit doubt;                      /* an earlier prepare was not confirmed */
};
Owner it[OWNERS + 1];
byte owner;                         /* the last one that acquired */
byte prepares, agains;
byte acknowledged;                  /* the content for which a caller got 201 */
byte r, n;                          /* scratch, inside d_step only */

inline append(what, c, w) {
    half[length].kind = what; half[length].content = c; half[length].writer = w; length++
}

#ifdef FIRST_COUNTS
#define COUNTS_MORE(o) false
#else
#ifdef LAST_COUNTS
#define COUNTS_MORE(o) true
#else
#define COUNTS_MORE(o) (half[r].writer > it[o].writer)
#endif
#endif

/* The fold of record r. */
inline apply(o) {
    if
    :: half[r].kind == again -> it[o].held = half[r].content; it[o].writer = half[r].writer; it[o].final = 1
    :: half[r].kind == prepare && (it[o].held == NOTHING || (!it[o].final && COUNTS_MORE(o))) ->
        it[o].held = half[r].content; it[o].writer = half[r].writer
    :: else                         /* a repeat, a stray, or a barrier */
    fi
}

inline acknowledge(c) {
    assert(acknowledged == NOTHING || acknowledged == c); /* two contents are acknowledged */
    acknowledged = c
}

#define FOUND(o) assert(acknowledged == NOTHING || it[o].held == acknowledged) /* another content is found */

/* What a paused instance tells a caller after another one has acquired the shard is not counted: docs/protocol.md. */
inline acknowledge_stored(o) {
    r = it[o].at - 1; n = r;
    do
    :: n > 0 && !(half[n - 1].kind == barrier && half[n - 1].writer > o) -> n--
    :: else -> break
    od;
    if
    :: n == 0 && it[o].held == it[o].stores -> acknowledge(it[o].held)
    :: else
    fi;
    r = 0; n = 0
}

#ifdef NOT_READ
#define IS_READ(o) true
#define APPLIES_ITSELF(o) true
#else
#define IS_READ(o) (!it[o].doubt || it[o].tail >= it[o].at)
#define APPLIES_ITSELF(o) (!it[o].doubt)
#endif
#ifdef NOT_FINAL
#define IS_FINAL(o) true
#else
#define IS_FINAL(o) (it[o].final || it[o].writer == o)
#endif
#ifdef DOUBT_DROPPED
#define DOUBT_AFTER_REFUSAL(o) 0
#else
#define DOUBT_AFTER_REFUSAL(o) it[o].doubt
#endif
/* Calls for an id wait while one of its halves is being stored. */
#define FREE(o) (it[o].stores == NOTHING)

#define PREPARES_CONTENT(c) \
    /* An unknown id: it is stored. If an earlier prepare was not confirmed, all that is in the log is read first. */ \
    :: atomic { it[o].serves && it[o].stores == NOTHING && it[o].held == NOTHING && prepares < PREPARES && \
        (!it[o].doubt || it[o].tail == length) && !(it[o].flight & (1 << c)) -> d_step { \
            prepares++; it[o].stores = c; it[o].flight = it[o].flight | (1 << c) } } \
    /* Kafka appends it, however late; nobody may wait for it any more. */ \
    :: atomic { it[o].flight & (1 << c) -> d_step { \
            append(prepare, c, o); it[o].flight = it[o].flight & ~(1 << c); \
            if \
            :: it[o].stores == c -> it[o].at = length \
            :: else \
            fi } } \
    /* Or it certainly stores nothing, and an earlier half may still be on its way. */ \
    :: atomic { it[o].stores == c && it[o].flight & (1 << c) -> d_step { \
            it[o].flight = it[o].flight & ~(1 << c); it[o].stores = NOTHING; it[o].doubt = DOUBT_AFTER_REFUSAL(o) } } \
    /* A known id with the same content. */ \
    :: atomic { it[o].serves && owner == o && FREE(o) && it[o].held == c && IS_FINAL(o) -> d_step { acknowledge(c) } }

proctype Serve(byte o) {
    /* The former owner is fenced: its lane writes nothing more, but its halves still arrive. */
    atomic { owner == o - 1 -> d_step {
        append(barrier, NOTHING, o); owner = o; it[o].tail = length; it[o].serves = 1;
        r = 0;
        do
        :: r < length -> apply(o); r++
        :: else -> break
        od;
        r = 0; FOUND(o) } }
end:
    do
    PREPARES_CONTENT(A)
    PREPARES_CONTENT(B)
    /* Its answer: applied at once, or when the tail has read all before it. */
    :: atomic { it[o].serves && it[o].stores != NOTHING && it[o].at != 0 && IS_READ(o) -> d_step {
        if
        :: APPLIES_ITSELF(o) -> r = it[o].at - 1; apply(o); r = 0
        :: else
        fi;
        acknowledge_stored(o); it[o].stores = NOTHING; it[o].at = 0; it[o].doubt = 0 } }
    /* The caller is told that it is not known. */
    :: atomic { it[o].stores != NOTHING -> d_step { it[o].stores = NOTHING; it[o].at = 0; it[o].doubt = 1 } }
    /* The lane writes the known half again: a re-anchor, the correction of a stray, or before an acknowledgement. */
    :: atomic { it[o].serves && owner == o && it[o].held != NOTHING && !it[o].final && FREE(o) && agains < AGAIN ->
        d_step { agains++; append(again, it[o].held, o); r = length - 1; apply(o); r = 0 } }
    /* The tail. */
    :: atomic { it[o].serves && it[o].tail < length -> d_step {
        r = it[o].tail; it[o].tail++;
        if
        :: half[r].kind == barrier -> it[o].serves = 0
        :: else -> apply(o)
        fi;
        r = 0;
        if
        :: owner == o && it[o].tail == length -> FOUND(o)
        :: else
        fi } }
    od
}

init {
    atomic { run Serve(1); run Serve(2); run Serve(3) }
}
