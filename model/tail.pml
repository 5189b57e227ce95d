/*
 * What the tail of half[s] may pass without decoding it, while its owner serves the shard, as in docs/protocol.md.
 * The owner prepares and ends transaction A. Another producer may write a late prepare of A, and a record of another id.
 * `make model` checks it exhaustively; docs/protocol.md says what is modelled.
 *
 * Each of these mutants leaves out one rule of the protocol, and the check must find an error in it:
 *   OFFSET_ALONE    the tail passes a record at an acknowledged offset under any key
 *   KNOWN_ID        it passes every record of an id that is pending here
 *   NOT_APPLIED     it passes a record that is acknowledged, and not yet applied
 *   COUNTED         it passes all up to the end if as many records and markers are its own
 *   POSITION_FIRST  the position moves when the tail has read, not when that has been applied
 *   TOMBSTONE_ALONE a tombstone that the tail decodes before the lane's answer is applied
 *   RESURRECT       a half that the tail decodes is applied although its tombstone has been
 */
#define OFFSETS 5
#define NO_OFFSET 255

/* The records of half[s], by offset. */
#define NONE 0
#define HALF_OF_A 1                 /* the owner's prepare */
#define TOMBSTONE 2                 /* the owner's lane, in a Kafka transaction */
#define MARKER 3                    /* ends that transaction; no client learns its offset */
#define LATE_HALF 4                 /* of A, by an instance that was paused */
#define OTHERS 5                    /* a record of another id; also a barrier record of a newer owner */

#define UNKNOWN 0
#define PENDING 1
#define ENDED 2

mtype = { absent, sent, appended, acknowledged, unanswered, applied };

byte log[OFFSETS];
byte length;
bit late, other, truncated;         /* each happens once at most */
byte truncated_to = NO_OFFSET;

mtype prepare = absent, ending = absent; /* where the owner's two writes are */
byte prepare_at = NO_OFFSET, tombstone_at = NO_OFFSET;

/* On the owner's event loop. */
byte known;                         /* its state of A */
byte own[OFFSETS];                  /* NONE, or which own record was applied at an offset that the tail has not passed */
bit done[OFFSETS];                  /* the record at an offset has had its effect */
bit ended;                          /* the outcome was applied */
byte position;                      /* read barriers depend on it */

/* The tail's thread. */
byte next, read_to;                 /* the next offset to read; the position of the last post */
byte aside, decoded;                /* bit masks of offsets */
chan posted = [2] of { byte, byte }; /* a position, and what was decoded before it */

byte n;                             /* scratch, inside d_step only */

/* A tombstone is visible when its marker is written, and nothing behind it before. */
#define VISIBLE(o) (o < length && (o < tombstone_at || marked))
bit marked;

inline append(record) {
    assert(length < OFFSETS);
    log[length] = record;
    length++
}

proctype Kafka() {
end:
    do
    /* The owner's prepare arrives. Its answer is on its way, or will never come. */
    :: atomic { prepare == sent -> d_step { prepare_at = length; append(HALF_OF_A); prepare = appended } }
    :: atomic { prepare == appended -> prepare = acknowledged }
    :: atomic { prepare == appended -> prepare = unanswered }
    /* So does its tombstone. The commit is answered before the marker is written. */
    :: atomic { ending == sent -> d_step { tombstone_at = length; append(TOMBSTONE); ending = appended } }
    :: atomic { ending == appended -> ending = acknowledged }
    :: atomic { tombstone_at != NO_OFFSET && !marked && (ending == acknowledged || ending == applied) ->
        d_step { append(MARKER); marked = 1 } }
    /* Records of others. */
    :: atomic { !late && length != truncated_to -> d_step { late = 1; append(LATE_HALF) } }
    :: atomic { !other -> d_step { other = 1; append(OTHERS) } }
    /* A leader that was not in sync loses the owner's prepare, and its offset is assigned again. */
    :: atomic { !truncated && prepare_at != NO_OFFSET && prepare_at == length - 1 && next < length && ending == absent ->
        d_step { truncated = 1; length--; truncated_to = length; log[length] = NONE } }
    od
}

inline note_own(o, record) {
    if
    :: o >= position -> own[o] = record
    :: else
    fi
}

/* What the owner's event loop applies when the tail has decoded a record. */
inline apply_decoded(o) {
    own[o] = NONE;
    if
    :: log[o] == HALF_OF_A || log[o] == LATE_HALF ->
        if
#ifdef RESURRECT
        :: known != PENDING -> known = PENDING
#else
        :: known == UNKNOWN && !(tombstone_at != NO_OFFSET && done[tombstone_at] && o < tombstone_at) -> known = PENDING
#endif
        :: else                     /* a repeat, or a stray that is written over later */
        fi
#ifdef TOMBSTONE_ALONE
    :: log[o] == TOMBSTONE && known == PENDING -> known = UNKNOWN
#endif
    :: else                         /* a tombstone waits for the lane's answer; other ids are not of interest here */
    fi;
    done[o] = 1
}

proctype Loop() {
    byte to, mask;
end:
    do
    :: atomic { prepare == absent -> prepare = sent }
    /* The answer to the prepare: applied, noted as own, and the caller is answered. */
    :: atomic { prepare == acknowledged ->
        d_step {
            prepare = applied;
            if
            :: known == UNKNOWN -> known = PENDING
            :: else
            fi;
            if
            :: prepare_at < length && log[prepare_at] == HALF_OF_A -> done[prepare_at] = 1
            :: else
            fi;
            note_own(prepare_at, HALF_OF_A)
        } }
    /* The end claims A; it is known until the lane's answer applies its outcome. */
    :: atomic { known == PENDING && ending == absent && !truncated -> ending = sent }
    :: atomic { ending == acknowledged ->
        d_step { ending = applied; known = ENDED; ended = 1; done[tombstone_at] = 1; note_own(tombstone_at, TOMBSTONE) } }
    /* What the tail has posted. */
    :: atomic { posted ? to, mask ->
        d_step {
            n = 0;
            do
            :: n < OFFSETS ->
                if
                :: mask & (1 << n) -> apply_decoded(n)
                :: else
                fi;
                n++
            :: else -> break
            od;
            position = to;
            n = 0;
            do
            :: n < position ->
                assert(done[n] || log[n] == MARKER); /* a record was passed without its effect */
                assert(own[n] == NONE); /* an own record is kept although the tail has passed it */
                n++
            :: else -> break
            od;
            n = 0;
            assert(!(ended && known != ENDED)); /* an ended transaction is not ended any more */
            assert(!(prepare == applied && known == UNKNOWN)) /* an acknowledged transaction is unknown */
        } }
    od
}

#ifdef OFFSET_ALONE
#define UNDER_ITS_KEY(o) true
#else
/* Both own records have A's key, and so has the late prepare. */
#define UNDER_ITS_KEY(o) (log[o] != OTHERS)
#endif
#ifdef NOT_APPLIED
#define IS_OWN(o) (own[o] != NONE || (prepare == acknowledged && prepare_at == o) || (ending == acknowledged && tombstone_at == o))
#else
#define IS_OWN(o) (own[o] != NONE)
#endif
#ifdef KNOWN_ID
#define IS_KNOWN(o) (known == PENDING && log[o] != OTHERS)
#else
#define IS_KNOWN(o) false
#endif
#define MAY_PASS(o) ((IS_OWN(o) && UNDER_ITS_KEY(o)) || IS_KNOWN(o))
/* Own records that were applied from the next offset on, and the marker of the lane's answered commit. */
#define COUNT ((prepare == applied && prepare_at >= next) + (ending == applied && tombstone_at >= next) * 2)

proctype Tail() {
end:
    do
    /* Read one record, and pass it or put it aside. */
    :: atomic { VISIBLE(next) ->
        d_step {
            if
            :: log[next] == MARKER
            :: log[next] != MARKER && MAY_PASS(next) -> own[next] = NONE
            :: else -> aside = aside | (1 << next)
            fi;
            next++
        } }
#ifdef COUNTED
    :: atomic { next < length && COUNT == length - next ->
        d_step {
            n = next; next = length;
            do
            :: n < length -> own[n] = NONE; n++
            :: else -> break
            od;
            n = 0
        } }
#endif
    /* Look once more at what was put aside, decode the rest, and post it with the position. */
    :: next > read_to ->
        d_step {
            n = 0;
            do
            :: n < OFFSETS ->
                if
                :: (aside & (1 << n)) && MAY_PASS(n) -> own[n] = NONE
                :: (aside & (1 << n)) && !(MAY_PASS(n)) -> decoded = decoded | (1 << n)
                :: else
                fi;
                n++
            :: else -> break
            od;
            n = 0; aside = 0; read_to = next
        };
#ifdef POSITION_FIRST
        position = read_to;
#endif
        posted ! read_to, decoded;
        decoded = 0
    od
}

/* A read barrier: a call for an id that is not known is answered 404 when the position has reached the end of its time. */
proctype Caller() {
    byte barrier;
    barrier = length;
end_of_its_time:
    atomic { position >= barrier ->
        d_step {
            n = 0;
            do
            :: n < barrier -> assert(done[n] || log[n] == MARKER || log[n] == NONE); n++ /* answered before it was applied */
            :: else -> break
            od;
            n = 0
        } }
}

init {
    atomic { run Kafka(); run Loop(); run Tail(); run Caller() }
}
