/*
 * Where a fold begins to read op[s] and where it ends: cursor, look-up by time, LSO and barrier, as in docs/protocol.md.
 * P owned the shard, with two lane ids that take turns; B acquires it. Each op marker is one outcome.
 * `make model` checks it exhaustively; docs/protocol.md says what is modelled.
 *
 * Each of these mutants leaves out one rule of the protocol, and the check must find an error in it:
 *   LSO_FORGOTTEN  the fold begins at the cursor if the look-up by time, which searches below the LSO, finds nothing
 *   LSO_AFTERWARDS it begins at the LSO as of after the look-up
 *   CURSOR_ALONE   it begins at the cursor, even if there are recent outcomes before it
 *   NO_BARRIER     it ends at the last visible record
 */
#define OUTCOMES 4
#define LANES 2

/* An op marker, by its offset. */
#define NONE 0
#define OPEN 1                      /* in a Kafka transaction that is open */
#define COMMITTING 2                /* its commit is accepted, its marker is not written */
#define ABORTING 3
#define VISIBLE 4
#define ABORTED 5
#define NOTHING 255

byte op[OUTCOMES];
byte length;                        /* where op[s] ends */
byte old;                           /* outcomes before this offset are older than the horizon */
byte followed;                      /* up to where P has applied its own writes */
byte cursor;                        /* the committed cursor of op[s] */
bit fenced;                         /* P's lane ids */
byte barrier = NOTHING;
byte cursor_then, horizon, stable, found, start; /* of B's fold; `stable` is the LSO */
byte lso, n;                        /* scratch, inside d_step only */

#define SETTLED(o) (op[o] == NONE || op[o] >= VISIBLE)
#define DECIDED(o) (op[o] == COMMITTING || op[o] == VISIBLE)

/* P: op markers on lane ids that take turns, answers, cursors. It may be paused at any step, and continue later. */
proctype Former() {
end:
    do
    /* The id whose turn it is can begin when the markers of its last transaction are written. */
    :: atomic { !fenced && length < OUTCOMES && (length == 0 || op[length - 1] != OPEN) &&
        (length < LANES || SETTLED(length - LANES)) -> op[length] = OPEN; length++ }
    :: atomic { !fenced && length > 0 && op[length - 1] == OPEN -> op[length - 1] = COMMITTING }
    /* The commit is answered before its markers are written; then it is applied, and callers are answered. */
    :: atomic { followed < length && DECIDED(followed) -> followed++ }
    /* A cursor is never ahead of the applied records. */
    :: atomic { cursor < followed -> cursor = followed }
    od
}

#define WRITES_MARKER(o) \
    :: atomic { op[o] == COMMITTING -> op[o] = VISIBLE } \
    :: atomic { op[o] == ABORTING -> op[o] = ABORTED }

proctype Kafka() {
end:
    do
    WRITES_MARKER(0)
    WRITES_MARKER(1)
    WRITES_MARKER(2)
    WRITES_MARKER(3)
    /* Time passes: outcomes become old in the order in which they were written. */
    :: atomic { old < length -> old++ }
    od
}

inline ask_lso() {
    lso = 0;
    do
    :: lso < length && SETTLED(lso) -> lso++
    :: else -> break
    od
}

/* Kafka searches only below the LSO. */
inline look_up() {
    d_step { ask_lso(); found = (horizon < lso -> horizon : NOTHING); lso = 0 }
}
inline note_lso() {
    d_step { ask_lso(); stable = lso; lso = 0 }
}

#ifdef LSO_FORGOTTEN
#define IF_NOTHING cursor_then
#else
#define IF_NOTHING stable
#endif
#ifdef CURSOR_ALONE
#define BEGINNING cursor_then
#else
#define BEGINNING (found < cursor_then -> found : cursor_then)
#endif
#ifdef NO_BARRIER
#define READ(o) true
#else
#define READ(o) SETTLED(o)
#endif

proctype Next() {
    /* 3. Fence: open transactions are aborted, decided ones are not waited for. 4. Claim: the barrier is at the end. */
    d_step {
        fenced = 1;
        if
        :: length > 0 && op[length - 1] == OPEN -> op[length - 1] = ABORTING
        :: else
        fi
    }
    barrier = length;
    /* 5. Fold, from the cursor or from the first record that is not older than the horizon. */
    d_step { cursor_then = cursor; horizon = old }
#ifdef LSO_AFTERWARDS
    look_up();
    note_lso();
#else
    note_lso();
    look_up();
#endif
    d_step {
        if
        :: found == NOTHING -> found = IF_NOTHING
        :: else
        fi;
        start = BEGINNING
    }
    atomic { READ(0) && READ(1) && READ(2) && READ(3) ->
        d_step {
            n = 0;
            do
            :: n < barrier ->
                assert(!DECIDED(n) || n < horizon || (n >= start && op[n] == VISIBLE)); /* a recent outcome is missed */
                n++
            :: else -> break
            od;
            n = 0
        } }
}

init {
    atomic { run Kafka(); run Former(); run Next() }
}
