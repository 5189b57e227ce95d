/*
 * One shard of halfway: half, op, lane, owners, fencing and check-back, as docs/protocol.md tells them.
 * `make model` checks it exhaustively; docs/model.md says what is modelled and what is left out.
 *
 * An instance that is paused is a process that takes no step while others do; a request that is delayed stays on its
 * way until it is delivered, also when its sender is long gone. The consumer group is left out: any instance may begin
 * to acquire at any time, as safety must not rest on the group.
 *
 * Each of these leaves one rule of the protocol out, and must be found to be wrong:
 *   NO_FENCE       step 3: the former owner's lane is not fenced
 *   NO_CLAIM_FENCE step 4: a claim is taken though somebody else began to acquire
 *   REINIT_OWN     after a failure a lane initialises its own id again, in place of a new incarnation
 *   NO_BARRIER     step 5: the fold takes what is visible for the end
 *   REUSE          after a failure a producer aborts and begins its next Kafka transaction (no KIP-890 part 2)
 *   EARLY_COMMIT   the commit is sent before every record is acknowledged
 *   RESURRECT      a half that comes after an outcome is pending again
 *   EARLY_ANSWER   a caller is told the outcome before the commit is
 */
#define INSTANCES 2
#ifndef PREPARES_MAX
#define PREPARES_MAX 3
#endif
#ifndef INCARNATIONS
#define INCARNATIONS 3
#endif
#ifndef TRANSACTIONS
#define TRANSACTIONS 2
#endif
#ifndef ACQUISITIONS
#define ACQUISITIONS 4
#endif

/* Outcomes, and what an instance knows of a transaction. */
#define UNKNOWN 0
#define COMMIT 1
#define ROLLBACK 2
#define PENDING 3

/* A lane's Kafka transaction, as the transaction coordinator has it. */
#define IDLE 0
#define OPEN 1
#define COMMITTING 2

mtype = { down, idle, reading, fencing, claiming, serving, producing, ending };

/* A transactional id: its epoch, its transaction, and the requests of its producer that are on their way. */
typedef Lane {
    byte epoch;
    byte state;
    byte tx, outcome;               /* the end that its transaction carries */
    byte first, second;             /* bit masks: whose first and second message were appended in this transaction */
    bit marker;                     /* the op marker and the tombstone were appended */
    byte way_first, way_second;     /* bit masks: messages on their way */
    bit way_marker, way_end;
    byte way_epoch;                 /* of what is on its way */
};

Lane lane[INCARNATIONS + 1];        /* by incarnation; 0 is nobody */
byte owner;                         /* the last owner record: an incarnation, 0 where it is released */
byte owner_epoch;                   /* of the transactional id owner.<s> */

/* The log. */
bit half[TRANSACTIONS];             /* half's last record is no tombstone */
byte op[TRANSACTIONS];              /* the outcome that read_committed shows */
byte first[TRANSACTIONS], second[TRANSACTIONS]; /* how often each message stands in its topic */

/* Instances. */
mtype at[INSTANCES] = down;
byte me[INSTANCES];                 /* incarnation */
byte my_epoch[INSTANCES];           /* of the lane, as its producer has it */
byte my_claim[INSTANCES];           /* epoch of owner.<s>, as this one got it */
byte former[INSTANCES];
byte waits[INSTANCES];              /* bit mask of lanes whose transactions stand open before the barrier */
bit way_claim[INSTANCES];           /* a claim on its way; it outlives a crash */
byte way_claim_by[INSTANCES], way_claim_epoch[INSTANCES];
bit claimed[INSTANCES];
bit append[INSTANCES];              /* a half on its way */
byte append_tx[INSTANCES];
typedef Known { byte as[TRANSACTIONS]; };
Known known[INSTANCES];

byte incarnations, acquisitions, prepares;

/* Ghosts: what was decided and told, for the properties. */
byte decided[TRANSACTIONS];
byte told[TRANSACTIONS];
bit acknowledged[TRANSACTIONS];

byte i, n, x;                       /* scratch, inside d_step only */

inline appear_first(t) {
    first[t]++;
    assert(first[t] <= 1);          /* doubled */
    assert(decided[t] == COMMIT)    /* leaked */
}

inline appear_second(t) {
    second[t]++;
    assert(second[t] <= 1);         /* doubled */
    assert(decided[t] == COMMIT)    /* leaked */
}

/* The markers of a committed transaction are written: all of it becomes visible. */
inline finish(l) {
    n = 0;
    do
    :: n < TRANSACTIONS ->
        if
        :: lane[l].first & (1 << n) -> appear_first(n)
        :: else
        fi;
        if
        :: lane[l].second & (1 << n) -> appear_second(n)
        :: else
        fi;
        n++
    :: else -> break
    od;
    if
    :: lane[l].marker -> op[lane[l].tx] = lane[l].outcome; half[lane[l].tx] = 0
    :: else
    fi;
    assert(first[lane[l].tx] == second[lane[l].tx]); /* torn */
    settle(l)
}

inline settle(l) {
    lane[l].state = IDLE;
    lane[l].first = 0; lane[l].second = 0; lane[l].marker = 0;
    i = 0;
    do
    :: i < INSTANCES -> waits[i] = waits[i] & ~(1 << l); i++
    :: else -> break
    od;
    i = 0; n = 0
}

/* InitProducerId: a new epoch; what was open is aborted, or completed where its commit was accepted. */
inline initialise(l) {
    if
    :: lane[l].state == COMMITTING -> finish(l)
    :: lane[l].state == OPEN -> settle(l)
    :: else
    fi;
    lane[l].epoch++
}

/* The barrier stands behind whatever is open now; the fold waits for that to be settled. */
inline barrier(s) {
    if
    :: me[s] == way_claim_by[s] && at[s] == claiming ->
        claimed[s] = 1;
#ifndef NO_BARRIER
        x = 1;
        do
        :: x <= INCARNATIONS ->
            if
            :: lane[x].state != IDLE -> waits[s] = waits[s] | (1 << x)
            :: else
            fi;
            x++
        :: else -> break
        od;
        x = 0
#endif
    :: else
    fi
}

inline fold(self) {
    n = 0;
    do
    :: n < TRANSACTIONS ->
#ifdef RESURRECT
        known[self].as[n] = (half[n] -> PENDING : op[n]);
#else
        known[self].as[n] = (op[n] != UNKNOWN -> op[n] : (half[n] -> PENDING : UNKNOWN));
#endif
        n++
    :: else -> break
    od;
    n = 0
}

inline forget(self) {
    n = 0;
    do
    :: n < TRANSACTIONS -> known[self].as[n] = UNKNOWN; n++
    :: else -> break
    od;
    n = 0; my_epoch[self] = 0; my_claim[self] = 0; former[self] = 0; waits[self] = 0; claimed[self] = 0; me[self] = 0
}

/* Crash, or give up this incarnation: nothing is left of it but what is on its way. */
inline die(self) { forget(self); at[self] = down }

/* What is done to an instance that could go on costs one of the restarts that there are. */
inline spend(self) {
#ifdef REINIT_OWN
    acquisitions++
#else
#ifdef REUSE
    acquisitions++
#else
    skip
#endif
#endif
}

/* A lane has failed, was fenced, or did not get an answer. */
inline fail(self) {
#ifdef REINIT_OWN
    initialise(me[self]); my_epoch[self] = lane[me[self]].epoch; fold(self); at[self] = serving
#else
#ifdef REUSE
    if
    :: lane[me[self]].epoch == my_epoch[self] && lane[me[self]].state == OPEN ->
        settle(me[self]); fold(self); lane[me[self]].way_end = 0; lane[me[self]].way_marker = 0; at[self] = serving
    :: else -> die(self)
    fi
#else
    die(self)
#endif
#endif
}

#define HAS_SPARE (incarnations < INCARNATIONS && acquisitions < ACQUISITIONS)
#define MINE lane[me[self]]
#define FENCED (MINE.epoch != my_epoch[self])

/* A prepare: the half is on its way. */
#define PREPARES(t) \
    :: atomic { at[self] == serving && !append[self] && known[self].as[t] == UNKNOWN && prepares < PREPARES_MAX -> \
        prepares++; append[self] = 1; append_tx[self] = t }

/* The tail: a half that somebody else appended. */
#ifdef RESURRECT
#define FOLLOWS(t) \
    :: atomic { at[self] == serving && half[t] && known[self].as[t] != PENDING -> known[self].as[t] = PENDING }
#else
#define FOLLOWS(t) \
    :: atomic { at[self] == serving && half[t] && known[self].as[t] == UNKNOWN -> \
        known[self].as[t] = (op[t] == UNKNOWN -> PENDING : op[t]) }
#endif

/* An end, or the verdict of a check: the lane begins a Kafka transaction, when its last one is finished. */
#ifdef EARLY_ANSWER
#define ANSWERS_NOW(t) told[t] = MINE.outcome;
#else
#define ANSWERS_NOW(t)
#endif
#define ENDS(t) \
    :: atomic { at[self] == serving && known[self].as[t] == PENDING && FENCED -> d_step { fail(self) } } \
    :: atomic { at[self] == serving && known[self].as[t] == PENDING && !FENCED && MINE.state == IDLE -> \
        MINE.state = OPEN; MINE.tx = t; MINE.way_epoch = my_epoch[self]; MINE.way_marker = 1; \
        if \
        :: MINE.outcome = COMMIT; MINE.way_first = MINE.way_first | (1 << t); \
           MINE.way_second = MINE.way_second | (1 << t) \
        :: MINE.outcome = ROLLBACK \
        fi; \
        ANSWERS_NOW(t) \
        at[self] = producing }

proctype Instance(byte self) {
end:
    do
    /* A new incarnation: its lane id is initialised before any owner record names it, once. */
    :: atomic { at[self] == down && incarnations < INCARNATIONS && acquisitions < ACQUISITIONS ->
        d_step { incarnations++; me[self] = incarnations; MINE.epoch++; my_epoch[self] = MINE.epoch; at[self] = idle } }

    /* 1. Fence whoever else is acquiring. */
    :: atomic { at[self] == idle && acquisitions < ACQUISITIONS ->
        d_step { acquisitions++; owner_epoch++; my_claim[self] = owner_epoch; at[self] = reading } }

    /* 2. Read the last owner record. */
    :: atomic { at[self] == reading -> d_step { former[self] = owner; at[self] = fencing } }

    /* 3. Fence the former owner's lane. */
    :: atomic { at[self] == fencing ->
        d_step {
#ifndef NO_FENCE
            if
            :: former[self] != 0 && former[self] != me[self] -> x = former[self]; initialise(x); x = 0
            :: else
            fi;
#endif
            /* 4. Claim. */
            way_claim[self] = 1; way_claim_by[self] = me[self]; way_claim_epoch[self] = my_claim[self];
            claimed[self] = 0; former[self] = 0; my_claim[self] = 0; at[self] = claiming } }

    /* The claim was refused: somebody else is acquiring. */
    :: atomic { at[self] == claiming && !claimed[self] && !way_claim[self] -> d_step { die(self) } }

    /* It was taken. 5. Fold up to the barrier. 6. Serve. */
    :: atomic { at[self] == claiming && claimed[self] && waits[self] == 0 ->
        d_step { fold(self); claimed[self] = 0; at[self] = serving } }

    PREPARES(0)
    FOLLOWS(0)
    ENDS(0)
#if TRANSACTIONS > 1
    PREPARES(1)
    FOLLOWS(1)
    ENDS(1)
#endif

    /* Everything is acknowledged: commit. */
    :: atomic { at[self] == producing && MINE.state == OPEN && !FENCED &&
#ifndef EARLY_COMMIT
        (MINE.outcome == ROLLBACK || ((MINE.first & (1 << MINE.tx)) && (MINE.second & (1 << MINE.tx)))) &&
#endif
        MINE.marker -> MINE.way_end = 1; at[self] = ending }

    /* The commit is answered, before its markers are written; only then the caller is. */
    :: atomic { at[self] == ending && !FENCED && !MINE.way_end && (MINE.state == COMMITTING || op[MINE.tx] != UNKNOWN) ->
        d_step {
            known[self].as[MINE.tx] = MINE.outcome;
            assert(decided[MINE.tx] == MINE.outcome); /* told what was not decided */
            told[MINE.tx] = MINE.outcome;
            at[self] = serving } }

    /* Fenced, or out of time: also where the commit was accepted and its answer lost. */
    :: atomic { (at[self] == producing || at[self] == ending) && FENCED -> d_step { fail(self) } }
    :: atomic { (at[self] == producing || at[self] == ending) && HAS_SPARE -> d_step { spend(self); fail(self) } }

    /* Revoked: release with one more transaction of the lane, on its other producer, and be idle. */
    :: atomic { at[self] == serving && owner == me[self] && !FENCED && acquisitions < ACQUISITIONS ->
        d_step { owner = 0; x = me[self]; n = my_epoch[self]; forget(self); me[self] = x; my_epoch[self] = n; x = 0; n = 0;
                 at[self] = idle } }

    /* kill -9, at any step. */
    :: atomic { at[self] != down && HAS_SPARE -> d_step { die(self) } }
    od
}

/* Kafka delivers what is on its way, in any order, sooner or later: a record where its epoch is the present one and its
   transaction is open. */
#define TAKES(l) (lane[l].way_epoch == lane[l].epoch && lane[l].state == OPEN)
#define DELIVERS_MESSAGES(l, t) \
    :: atomic { lane[l].way_first & (1 << t) -> d_step { lane[l].way_first = lane[l].way_first & ~(1 << t); \
        if \
        :: TAKES(l) -> lane[l].first = lane[l].first | (1 << t) \
        :: else \
        fi } } \
    :: atomic { lane[l].way_second & (1 << t) -> d_step { lane[l].way_second = lane[l].way_second & ~(1 << t); \
        if \
        :: TAKES(l) -> lane[l].second = lane[l].second | (1 << t) \
        :: else \
        fi } }
#define DELIVERS(l) \
    :: atomic { lane[l].way_marker -> d_step { lane[l].way_marker = 0; \
        if \
        :: TAKES(l) -> lane[l].marker = 1 \
        :: else \
        fi } } \
    :: atomic { lane[l].way_end -> d_step { lane[l].way_end = 0; \
        if \
        :: TAKES(l) -> \
            lane[l].state = COMMITTING; \
            assert(decided[lane[l].tx] == UNKNOWN); /* decided twice */ \
            decided[lane[l].tx] = lane[l].outcome \
        :: else \
        fi } } \
    :: atomic { lane[l].state == COMMITTING -> d_step { finish(l) } } \
    DELIVERS_MESSAGES(l, 0) \
    DELIVERS_ALSO(l)
#if TRANSACTIONS > 1
#define DELIVERS_ALSO(l) DELIVERS_MESSAGES(l, 1)
#else
#define DELIVERS_ALSO(l)
#endif

/* A claim is taken where nobody has begun to acquire since: the owner record and the barriers are one transaction. */
#ifdef NO_CLAIM_FENCE
#define CLAIMS(s) true
#else
#define CLAIMS(s) (way_claim_epoch[s] == owner_epoch)
#endif

proctype Kafka() {
    byte s;
end:
    do
    DELIVERS(1)
    DELIVERS(2)
#if INCARNATIONS > 2
    DELIVERS(3)
#endif
#if INCARNATIONS > 3
    DELIVERS(4)
#endif
    :: atomic { (way_claim[0] || way_claim[1]) ->
        if
        :: way_claim[0] -> s = 0
        :: way_claim[1] -> s = 1
        fi;
        d_step { way_claim[s] = 0;
            if
            :: CLAIMS(s) -> owner = way_claim_by[s]; barrier(s)
            :: else
            fi;
            way_claim_by[s] = 0; way_claim_epoch[s] = 0; s = 0 } }
    /* A half is appended, whoever owns the shard now, and acknowledged where its sender still waits. */
    :: atomic { (append[0] || append[1]) ->
        if
        :: append[0] -> s = 0
        :: append[1] -> s = 1
        fi;
        d_step { append[s] = 0; half[append_tx[s]] = 1;
            if
            :: at[s] != down && known[s].as[append_tx[s]] == UNKNOWN ->
                known[s].as[append_tx[s]] = PENDING; acknowledged[append_tx[s]] = 1
            :: else
            fi;
            append_tx[s] = 0; s = 0 } }
    od
}

#define SOUND(t) \
    assert(!acknowledged[t] || half[t] || op[t] != UNKNOWN); /* an acknowledged prepare is lost */ \
    assert(op[t] == decided[t]); \
    assert(told[t] == UNKNOWN || told[t] == op[t]); /* an acknowledged outcome is lost */ \
    assert(first[t] == (op[t] == COMMIT -> 1 : 0) && second[t] == first[t]); \
    assert(!acknowledged[t] || op[t] != UNKNOWN || !SERVED) /* pending for ever */
#define SERVES(s) (at[s] == serving && me[s] == owner && lane[me[s]].epoch == my_epoch[s])
#define SERVED (SERVES(0) || SERVES(1))

/* When nothing is left to do. */
proctype Rest() {
end:
    timeout -> d_step {
        SOUND(0);
#if TRANSACTIONS > 1
        SOUND(1)
#endif
    }
}

init {
    atomic { run Kafka(); run Instance(0); run Instance(1); run Rest() }
}
