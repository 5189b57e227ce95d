/*
 * The ownership of one shard of halfway: owners, half, op, lanes, releases and fencing, as in docs/protocol.md.
 * `make model` checks it exhaustively; docs/protocol.md says what is modelled and what is left out.
 *
 * A paused instance is a process that takes no step while others do. A delayed request stays in flight until it is
 * delivered, even if its sender is gone. The consumer group is left out: any instance may begin to acquire, give up
 * acquiring, drop or release at any time, because safety must not depend on the group.
 *
 * Each of these mutants leaves out one rule of the protocol, and the check must find an error in it:
 *   NO_FENCE        step 3: the former owner's lane ids are not fenced
 *   NO_CLAIM_FENCE  step 4: a claim is accepted although another instance began to acquire
 *   NO_TRUE_END     steps 2 and 3: the owner records are read to the LSO, and no further
 *   UNRAISED        step 3: a decided lane id is not waited for, although its epoch was not raised
 *   NO_BARRIER      step 5: the fold ends at the last visible record
 *   ONE_BARRIER     step 5: the fold waits for its barrier in half, and ends at the last visible record of op
 *   UNCLOSED        step 3: a lane id of the same process is not waited for, although its client still commits
 *   LATE_RELEASE    an incarnation acquires again while the outcome of its release is unknown
 *   UNFINISHED      an incarnation drops a shard with an end under way, and may acquire it again
 *   UNSURE_RELEASE  an incarnation releases a claim whose outcome is unknown
 *   HASTY_RELEASE   a release overtakes an end that the lane is writing
 *   REINIT_OWN      after a failure a lane initialises its own ids again, instead of a new incarnation
 *   REUSE           after a failure a producer aborts and begins its next Kafka transaction (no KIP-890 part 2)
 *   EARLY_COMMIT    the commit is sent before every record is acknowledged
 *   RESURRECT       a half that arrives after an outcome becomes pending again
 *   EARLY_ANSWER    a caller gets the outcome before the commit is answered
 * And one mutant that is safe, but must be found to wait forever if a user partition takes no markers (STUCK):
 *   WAITS           step 3: a decided lane id of the same process is waited for
 */
#define INSTANCES 2
#ifndef LANES                       /* transactional ids of an incarnation that take turns */
#define LANES 2
#endif
#ifndef PREPARES
#define PREPARES 2
#endif
#ifndef INCARNATIONS
#define INCARNATIONS 3
#endif
#ifndef TRANSACTIONS
#define TRANSACTIONS 1
#endif
#ifndef ACQUISITIONS
#define ACQUISITIONS 3
#endif
#ifndef OTHERS                      /* Kafka transactions of the lanes for other shards */
#define OTHERS 0
#endif

/* Outcomes, and an instance's state of a transaction. */
#define UNKNOWN 0
#define COMMIT 1
#define ROLLBACK 2
#define PENDING 3

/* The state of a transactional id at the transaction coordinator; the last two are decided. */
#define IDLE 0
#define OPEN 1
#define COMMITTING 2
#define ABORTING 3

/* The purpose of a Kafka transaction of the lane. */
#define NOTHING 0
#define END 1
#define RELEASE 2
#define OTHER 3

/* The partitions in which the marker of a decided transaction is not written yet. */
#define IN_USERS 1
#define IN_OP 2
#define IN_HALF 4
#define IN_OWNERS 8

/* Records in owners after the first unsettled one: claims by their incarnation, and these. */
#define RELEASED 9
#define ABORTED 10
#define UNSETTLED 16                /* and the id */
#define QUEUE 4

mtype = { down, idle, reading, fencing, claiming, serving };
mtype = { resting, producing, ending };

/* A transactional id: its transaction, and its producer's requests in flight. */
typedef Id {
    byte state, work;
    byte tx, outcome;               /* the end in its transaction */
    bit fenced;                     /* another instance raised its epoch */
    byte first, second;             /* bit masks: whose first and second message were appended in this transaction */
    bit record;                     /* the op marker and the tombstone were appended: in half, or in owners */
    byte markers;                   /* bit mask: where the marker of a decided one is still to be written */
    byte way_first, way_second;     /* bit masks: messages in flight */
    bit way_record, way_end;
};
#define IDS (INCARNATIONS * LANES)
#define ID(incarnation, turn) (((incarnation) - 1) * LANES + (turn))

Id id[IDS];
byte owner;                         /* the last owner record up to the LSO: an incarnation, 0 if released */
byte behind[QUEUE];                 /* and the records after the LSO */
byte claimer;                       /* the instance, and 1, that initialised owner.<s> last */

/* The log. */
bit half[TRANSACTIONS];             /* half's last record is not a tombstone */
byte op[TRANSACTIONS];              /* the outcome that read_committed shows */
byte first[TRANSACTIONS], second[TRANSACTIONS]; /* copies of each message in its topic */

/* Instances. */
typedef Known { byte as[TRANSACTIONS]; };
typedef Instance {
    mtype at;                       /* its state for the shard */
    mtype lane;                     /* its lane's state in a Kafka transaction */
    byte me;                        /* incarnation */
    bit turn;                       /* the lane id whose turn it is */
    byte work, tx, outcome;         /* the lane's current work */
    byte former;                    /* the incarnation that it fences, or fenced last in this acquisition */
    byte left;                      /* bit mask: the lane ids of that incarnation that are not fenced yet */
    bit asks;                       /* a claim in flight; it outlives a crash */
    byte asks_for;
    bit claimed;
    byte waits;                     /* bit mask of ids whose transactions are open before the barrier */
    bit append;                     /* a half in flight */
    byte append_tx;
    Known known;
};
Instance it[INSTANCES];
bit ran[IDS + 1];                   /* by incarnation: its instance */
byte incarnations, acquisitions, prepares, others;

/* Ghost variables for the properties: what was decided and answered. */
byte decided[TRANSACTIONS];
byte told[TRANSACTIONS];
bit acknowledged[TRANSACTIONS];

byte i, n, x;                       /* scratch, inside d_step only */

/* --- Kafka */

inline owners_advance() {
    do
    :: behind[0] != 0 && behind[0] < UNSETTLED ->
        if
        :: behind[0] == ABORTED
        :: behind[0] == RELEASED -> owner = 0
        :: else -> owner = behind[0]
        fi;
        n = 0;
        do
        :: n < QUEUE - 1 -> behind[n] = behind[n + 1]; n++
        :: else -> break
        od;
        behind[QUEUE - 1] = 0; n = 0
    :: else -> break
    od
}

inline owners_append(value) {
    n = 0;
    do
    :: behind[n] != 0 -> n++; assert(n < QUEUE)
    :: else -> break
    od;
    behind[n] = value; n = 0;
    owners_advance()
}

inline owners_settle(l, value) {
    n = 0;
    do
    :: n < QUEUE ->
        if
        :: behind[n] == UNSETTLED + l -> behind[n] = value
        :: else
        fi;
        n++
    :: else -> break
    od;
    n = 0;
    owners_advance()
}

/* All markers of a transaction are written: its id can begin the next one. */
inline settle(l) {
    id[l].state = IDLE; id[l].work = NOTHING; id[l].tx = 0; id[l].outcome = UNKNOWN;
    id[l].first = 0; id[l].second = 0; id[l].record = 0; id[l].markers = 0
}

/* The LSO advances: a fold that waits for this transaction in the partitions of its barrier continues. */
#ifdef ONE_BARRIER
#define BARRIERS IN_HALF
#else
#define BARRIERS (IN_HALF | IN_OP)
#endif
inline pass(l) {
    if
    :: id[l].markers & BARRIERS
    :: else ->
        i = 0;
        do
        :: i < INSTANCES -> it[i].waits = it[i].waits & ~(1 << l); i++
        :: else -> break
        od;
        i = 0
    fi
}

inline appear(t, l) {
    if
    :: id[l].first & (1 << t) -> first[t]++
    :: else
    fi;
    if
    :: id[l].second & (1 << t) -> second[t]++
    :: else
    fi;
    assert(first[t] <= 1 && second[t] <= 1);                /* doubled */
    assert(decided[t] == COMMIT || first[t] + second[t] == 0) /* leaked */
}

/* The marker is written in one partition: its records there become visible, or are lost for good. */
inline mark(l, where) {
    id[l].markers = id[l].markers & ~where;
    if
    :: id[l].state == COMMITTING && where == IN_USERS ->
        appear(0, l);
#if TRANSACTIONS > 1
        appear(1, l);
#endif
        assert(id[l].work != END || first[id[l].tx] == second[id[l].tx]) /* torn */
    :: id[l].state == COMMITTING && where == IN_OP && id[l].record -> op[id[l].tx] = id[l].outcome
    :: id[l].state == COMMITTING && where == IN_HALF && id[l].record -> half[id[l].tx] = 0
    :: where == IN_OWNERS && id[l].record -> owners_settle(l, (id[l].state == COMMITTING -> RELEASED : ABORTED))
    :: else
    fi;
    pass(l);
    if
    :: id[l].markers == 0 -> settle(l)
    :: else
    fi
}

/* EndTxn, in time. */
inline decide(l) {
    id[l].state = COMMITTING;
    if
    :: id[l].work == END ->
        assert(decided[id[l].tx] == UNKNOWN); /* decided twice */
        decided[id[l].tx] = id[l].outcome;
        id[l].markers = ((id[l].outcome == COMMIT || id[l].first || id[l].second) -> IN_USERS : 0) | IN_OP | IN_HALF
    :: id[l].work == RELEASE -> id[l].markers = IN_OWNERS
    :: else -> id[l].markers = IN_USERS
    fi
}

/* An open transaction is aborted. */
inline abort(l) {
    id[l].state = ABORTING;
    id[l].markers = (id[l].work == OTHER || id[l].outcome == COMMIT -> IN_USERS : 0) | \
        (id[l].record -> (id[l].work == RELEASE -> IN_OWNERS : IN_OP | IN_HALF) : 0);
    if
    :: id[l].markers == 0 -> settle(l)
    :: else
    fi
}

/* A transaction that must have ended is ended now. */
inline complete(l) {
    if
    :: id[l].state == OPEN -> abort(l)
    :: else
    fi;
    if
    :: id[l].markers & IN_USERS -> mark(l, IN_USERS)
    :: else
    fi;
    if
    :: id[l].markers & IN_OP -> mark(l, IN_OP)
    :: else
    fi;
    if
    :: id[l].markers & IN_HALF -> mark(l, IN_HALF)
    :: else
    fi;
    if
    :: id[l].markers & IN_OWNERS -> mark(l, IN_OWNERS)
    :: else
    fi
}

/* InitProducerId raises the epoch: requests in flight will be refused. */
inline refuse(l) { id[l].way_first = 0; id[l].way_second = 0; id[l].way_record = 0; id[l].way_end = 0 }
inline raise(l) {
    id[l].fenced = 1;
    refuse(l);
    if
    :: id[l].state == OPEN -> abort(l)
    :: else
    fi
}

/* A claim is written: the owner record and the barriers, which are after all open transactions. */
inline claim(s) {
    owners_append(it[s].asks_for);
    if
    :: it[s].me == it[s].asks_for && it[s].at == claiming ->
        it[s].claimed = 1;
#ifndef NO_BARRIER
        x = 0;
        do
        :: x < IDS ->
            if
            :: id[x].work == END && id[x].record && (id[x].state == OPEN || (id[x].markers & BARRIERS)) ->
                it[s].waits = it[s].waits | (1 << x)
            :: else
            fi;
            x++
        :: else -> break
        od;
        x = 0
#endif
    :: else
    fi;
    it[s].asks = 0; it[s].asks_for = 0
}

/* --- an instance */

inline fold(self) {
    n = 0;
    do
    :: n < TRANSACTIONS ->
#ifdef RESURRECT
        it[self].known.as[n] = (half[n] -> PENDING : op[n]);
#else
        it[self].known.as[n] = (op[n] != UNKNOWN -> op[n] : (half[n] -> PENDING : UNKNOWN));
#endif
        n++
    :: else -> break
    od;
    n = 0
}

/* The instance loses the shard; its lane continues. */
inline drop(self) {
    n = 0;
    do
    :: n < TRANSACTIONS -> it[self].known.as[n] = UNKNOWN; n++
    :: else -> break
    od;
    n = 0;
    it[self].former = 0; it[self].left = 0; it[self].claimed = 0; it[self].waits = 0;
    it[self].at = idle
}

inline rest(self) { it[self].lane = resting; it[self].work = NOTHING; it[self].tx = 0; it[self].outcome = UNKNOWN }

/* Killed, or the end of an incarnation: only its requests in flight remain. */
inline die(self) { drop(self); rest(self); it[self].turn = 0; it[self].me = 0; it[self].at = down }

#define MINE ID(it[self].me, it[self].turn)
#define HAS_SPARE (incarnations < INCARNATIONS && acquisitions < ACQUISITIONS)

/* A lane has failed, was fenced, or did not get an answer. */
inline fail(self) {
#ifdef REINIT_OWN
    if
    :: it[self].at == serving ->
        x = 0;
        do
        :: x < LANES -> complete(ID(it[self].me, x)); refuse(ID(it[self].me, x)); id[ID(it[self].me, x)].fenced = 0; x++
        :: else -> break
        od;
        x = 0; rest(self); fold(self)
    :: else -> die(self)
    fi
#else
#ifdef REUSE
    if
    :: it[self].at == serving && !id[MINE].fenced && id[MINE].state == OPEN ->
        complete(MINE); id[MINE].way_end = 0; id[MINE].way_record = 0; rest(self); fold(self)
    :: else -> die(self)
    fi
#else
    die(self)
#endif
#endif
}

/* A prepare: the half is in flight. */
#define PREPARES_OF(t) \
    :: atomic { it[self].at == serving && !it[self].append && it[self].known.as[t] == UNKNOWN && prepares < PREPARES -> \
        prepares++; it[self].append = 1; it[self].append_tx = t }

/* The tail: a half that another instance appended. */
#ifdef RESURRECT
#define FOLLOWS(t) \
    :: atomic { it[self].at == serving && half[t] && it[self].known.as[t] != PENDING -> it[self].known.as[t] = PENDING }
#else
#define FOLLOWS(t) \
    :: atomic { it[self].at == serving && half[t] && it[self].known.as[t] == UNKNOWN -> \
        it[self].known.as[t] = (op[t] == UNKNOWN -> PENDING : op[t]) }
#endif

/* The lane begins a Kafka transaction on the id whose turn it is, after that id's last one has ended. */
inline begin(self, what) {
    it[self].lane = producing; it[self].work = what;
    id[MINE].state = OPEN; id[MINE].work = what; id[MINE].way_record = (what != OTHER)
}
#define MAY_BEGIN (it[self].lane == resting && !id[MINE].fenced && id[MINE].state == IDLE)
#define FENCED (it[self].me != 0 && id[MINE].fenced)

/* An end, or the verdict of a check. */
#ifdef EARLY_ANSWER
#define ANSWERS_NOW told[it[self].tx] = it[self].outcome
#else
#define ANSWERS_NOW skip
#endif
#define ENDS(t, how) \
    :: atomic { it[self].at == serving && it[self].known.as[t] == PENDING && MAY_BEGIN -> d_step { \
        begin(self, END); it[self].tx = t; it[self].outcome = how; id[MINE].tx = t; id[MINE].outcome = how; \
        if \
        :: how == COMMIT -> id[MINE].way_first = id[MINE].way_first | (1 << t); \
            id[MINE].way_second = id[MINE].way_second | (1 << t) \
        :: else \
        fi; \
        ANSWERS_NOW } }

proctype Serve(byte self) {
end:
    do
    /* A new incarnation: its lane ids are initialised once, before any owner record names them. */
    :: atomic { it[self].at == down && incarnations < INCARNATIONS && acquisitions < ACQUISITIONS ->
        d_step { incarnations++; it[self].me = incarnations; ran[incarnations] = self; it[self].at = idle } }

    /* 1. Fence other instances that are acquiring. This incarnation's own releases are settled by now. */
#ifdef LATE_RELEASE
#define IS_CERTAIN true
#else
#define IS_CERTAIN (it[self].work != RELEASE)
#endif
    :: atomic { it[self].at == idle && acquisitions < ACQUISITIONS && IS_CERTAIN ->
        d_step {
            acquisitions++;
#ifndef NO_CLAIM_FENCE
            it[0].asks = 0; it[0].asks_for = 0; it[1].asks = 0; it[1].asks_for = 0;
#endif
            claimer = self + 1; it[self].at = reading } }

    /* 2. Read the owner records up to the LSO; the last owner is fenced. */
    :: atomic { it[self].at == reading && owner != 0 && owner != it[self].me && owner != it[self].former ->
        d_step { it[self].former = owner; it[self].left = (1 << LANES) - 1; it[self].at = fencing } }

    /* 3. Fence each of its lane ids. */
#ifdef NO_FENCE
#define FENCES(k) \
    :: atomic { it[self].at == fencing && (it[self].left & (1 << k)) -> it[self].left = it[self].left & ~(1 << k) }
#else
#define FENCES(k) \
    :: atomic { it[self].at == fencing && (it[self].left & (1 << k)) && !id[ID(it[self].former, k)].fenced && \
        id[ID(it[self].former, k)].state <= OPEN -> d_step { x = ID(it[self].former, k); raise(x); x = 0 } } \
    :: atomic { it[self].at == fencing && (it[self].left & (1 << k)) && SETTLED(ID(it[self].former, k)) -> \
        it[self].left = it[self].left & ~(1 << k) }
#endif
    /* Nothing more is committed on an id whose epoch was raised, nor on one of the same process, which has destroyed its
       client: their open or decided transactions are not waited for. */
#ifdef UNRAISED
#define SETTLED(l) (id[l].fenced || id[l].state >= COMMITTING || ran[it[self].former] == self)
#else
#ifdef WAITS
#define SETTLED(l) (id[l].fenced && id[l].state == IDLE)
#else
#define SETTLED(l) (id[l].fenced || ran[it[self].former] == self)
#endif
#endif
    FENCES(0)
#if LANES > 1
    FENCES(1)
#endif
    :: atomic { it[self].at == fencing && it[self].left == 0 -> it[self].at = reading }

    /* 4. At the true end of the owner records: claim. */
#ifdef NO_CLAIM_FENCE
#define MAY_CLAIM true
#else
#define MAY_CLAIM (claimer == self + 1)
#endif
#ifdef NO_TRUE_END
#define AT_END true
#else
#define AT_END (behind[0] == 0)
#endif
    :: atomic { it[self].at == reading && (owner == 0 || owner == it[self].me || owner == it[self].former) && AT_END ->
        d_step {
            it[self].former = 0; it[self].at = claiming;
            if
            :: MAY_CLAIM -> it[self].asks = 1; it[self].asks_for = it[self].me
            :: else /* refused */
            fi } }

    /* 5. The claim was accepted: fold up to the barrier. 6. Serve. */
    :: atomic { it[self].at == claiming && it[self].claimed && it[self].waits == 0 ->
        d_step { fold(self); it[self].claimed = 0; it[self].at = serving } }

    PREPARES_OF(0)
    FOLLOWS(0)
    ENDS(0, COMMIT)
    ENDS(0, ROLLBACK)
#if TRANSACTIONS > 1
    PREPARES_OF(1)
    FOLLOWS(1)
    ENDS(1, COMMIT)
    ENDS(1, ROLLBACK)
#endif

    /* The same lane's work for other shards. */
    :: atomic { it[self].me != 0 && others < OTHERS && MAY_BEGIN -> d_step { others++; begin(self, OTHER) } }

    /* Everything is acknowledged: commit. */
#ifdef EARLY_COMMIT
#define ALL_MESSAGES true
#else
#define ALL_MESSAGES (id[MINE].outcome != COMMIT || \
    ((id[MINE].first & (1 << id[MINE].tx)) && (id[MINE].second & (1 << id[MINE].tx))))
#endif
    :: atomic { it[self].lane == producing && !id[MINE].fenced && ALL_MESSAGES && (id[MINE].record || id[MINE].work == OTHER) -> d_step { id[MINE].way_end = 1; it[self].lane = ending } }

    /* The commit is answered before its markers are written; the caller is answered after that. */
    :: atomic { it[self].lane == ending && !id[MINE].fenced && !id[MINE].way_end && id[MINE].state != OPEN ->
        d_step {
            if
            :: it[self].work == END ->
                assert(decided[it[self].tx] == it[self].outcome); /* an answer that was not decided */
                told[it[self].tx] = it[self].outcome;
                if
                :: it[self].at == serving -> it[self].known.as[it[self].tx] = it[self].outcome
                :: else
                fi
            :: else
            fi;
#if LANES > 1
            it[self].turn = 1 - it[self].turn;
#endif
            rest(self) } }

    /* An acquisition is given up; its claim may be in flight, or written. */
    :: atomic { (it[self].at == reading || it[self].at == fencing || it[self].at == claiming) &&
        acquisitions < ACQUISITIONS -> d_step { drop(self) } }

    /* Revoked, or not wanted any more: release, with one more transaction of the lane. */
    :: atomic { (it[self].at == serving || (it[self].at == claiming && it[self].claimed)) && MAY_BEGIN &&
        acquisitions < ACQUISITIONS -> d_step { drop(self); begin(self, RELEASE) } }
#ifdef UNFINISHED
    :: atomic { it[self].at == serving && acquisitions < ACQUISITIONS -> d_step { drop(self) } }
#endif
#ifdef UNSURE_RELEASE
    :: atomic { it[self].at == claiming && !it[self].claimed && MAY_BEGIN && acquisitions < ACQUISITIONS ->
        d_step { drop(self); begin(self, RELEASE) } }
#endif
#ifdef HASTY_RELEASE
    :: atomic { it[self].at == serving && it[self].work == END && id[ID(it[self].me, 1 - it[self].turn)].state == IDLE &&
        !id[ID(it[self].me, 1 - it[self].turn)].fenced && acquisitions < ACQUISITIONS -> d_step {
            drop(self); x = ID(it[self].me, 1 - it[self].turn);
            id[x].state = OPEN; id[x].work = RELEASE; id[x].record = 1; owners_append(UNSETTLED + x); id[x].way_end = 1;
            x = 0 } }
#endif

    /* Fenced; or killed at any step, out of time, without an answer. */
    :: atomic { FENCED && (it[self].lane != resting || (it[self].at == serving && it[self].known.as[0] == PENDING)) ->
        d_step { fail(self) } }
#if defined(REINIT_OWN) || defined(REUSE)
    :: atomic { it[self].lane != resting && HAS_SPARE -> d_step { acquisitions++; fail(self) } }
#endif
    :: atomic { it[self].at != down && HAS_SPARE -> d_step { die(self) } }
    od
}

/* Requests in flight for one transactional id are delivered in any order, eventually: a record is accepted if its
   transaction is open. */
#define DELIVERS(t) \
    :: atomic { id[l].way_first & (1 << t) -> d_step { id[l].way_first = id[l].way_first & ~(1 << t); \
        if \
        :: id[l].state == OPEN -> id[l].first = id[l].first | (1 << t) \
        :: else \
        fi } } \
    :: atomic { id[l].way_second & (1 << t) -> d_step { id[l].way_second = id[l].way_second & ~(1 << t); \
        if \
        :: id[l].state == OPEN -> id[l].second = id[l].second | (1 << t) \
        :: else \
        fi } }
#ifdef STUCK
#define USERS_TAKE_MARKERS false
#else
#define USERS_TAKE_MARKERS true
#endif

proctype Coordinate(byte l) {
end:
    do
    DELIVERS(0)
#if TRANSACTIONS > 1
    DELIVERS(1)
#endif
    :: atomic { id[l].way_record -> d_step { id[l].way_record = 0;
        if
        :: id[l].state == OPEN ->
            id[l].record = 1;
            if
            :: id[l].work == RELEASE -> owners_append(UNSETTLED + l)
            :: else
            fi
        :: else
        fi } }
    :: atomic { id[l].way_end -> d_step { id[l].way_end = 0;
        if
        :: id[l].state == OPEN -> decide(l)
        :: else
        fi } }
#ifdef UNCLOSED
    :: atomic { id[l].state == OPEN && id[l].record && ((id[l].first & id[l].second & (1 << id[l].tx)) || \
        id[l].outcome != COMMIT) -> d_step { decide(l) } }
#endif
    /* The markers are written partition by partition. */
    :: atomic { (id[l].markers & IN_USERS) && USERS_TAKE_MARKERS -> d_step { mark(l, IN_USERS) } }
    :: atomic { id[l].markers & IN_OP -> d_step { mark(l, IN_OP) } }
    :: atomic { id[l].markers & IN_HALF -> d_step { mark(l, IN_HALF) } }
    :: atomic { id[l].markers & IN_OWNERS -> d_step { mark(l, IN_OWNERS) } }
    od
}

proctype Lead(byte s) {
end:
    do
    /* A claim is accepted if no instance has begun to acquire since: owner record and barriers are one transaction. */
    :: atomic { it[s].asks -> d_step { claim(s) } }
    /* A half is appended, whichever instance owns the shard now, and acknowledged if its sender still waits. */
    :: atomic { it[s].append -> d_step {
        it[s].append = 0; half[it[s].append_tx] = 1;
        if
        :: it[s].at == serving && it[s].known.as[it[s].append_tx] == UNKNOWN ->
            it[s].known.as[it[s].append_tx] = PENDING; acknowledged[it[s].append_tx] = 1
        :: else
        fi;
        it[s].append_tx = 0 } }
    od
}

#define SERVES(s) (it[s].at == serving && it[s].me == owner && !id[ID(it[s].me, 0)].fenced)
#define SERVED (SERVES(0) || SERVES(1))
#define SOUND(t) \
    assert(!acknowledged[t] || half[t] || op[t] != UNKNOWN); /* an acknowledged prepare is lost */ \
    assert(op[t] == decided[t]); \
    assert(told[t] == UNKNOWN || told[t] == op[t]); /* an acknowledged outcome is lost */ \
    assert(!acknowledged[t] || op[t] != UNKNOWN || !SERVED); /* pending forever */ \
    assert(first[t] == (op[t] == COMMIT -> 1 : 0) && second[t] == first[t])
#define WAITS_FOR_ITS_OWN(s) (it[s].at == fencing && ran[it[s].former] == s)

/* When nothing is left to do. */
proctype Rest() {
end:
    timeout -> d_step {
#ifndef STUCK
        SOUND(0);
#if TRANSACTIONS > 1
        SOUND(1);
#endif
#endif
        assert(!WAITS_FOR_ITS_OWN(0) && !WAITS_FOR_ITS_OWN(1))
    }
}

init {
    atomic {
        it[0].at = down; it[1].at = down; it[0].lane = resting; it[1].lane = resting;
        run Serve(0); run Serve(1); run Lead(0); run Lead(1); run Rest();
        x = 0;
        do
        :: x < IDS -> run Coordinate(x); x++
        :: else -> break
        od;
        x = 0
    }
}
