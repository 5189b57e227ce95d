/*
 * That an id is decided once, ever, although outcomes are forgotten and clocks are wrong, as in docs/protocol.md.
 * One id, which is born at BORN. Two owners have its shard one after the other, each with a clock that is set forward and
 * back at any time. Clients prepare the id anywhere and again.
 * `make model` checks it exhaustively; docs/protocol.md says what is modelled.
 *
 * Each of these mutants leaves out one rule of the protocol, and the check must find an error in it:
 *   AGE_IGNORED     an id that is not known is accepted, however old it is
 *   CLOCK_ALONE     its age is judged by the clock alone, which may have been set back since an outcome was forgotten
 *   END_ALONE       what was forgotten is noted by the end of a transaction, although its id may be born after that
 *   NO_MINUTE       an outcome is read by a new owner for the horizon only, although its id may be born after it
 *   FORGOTTEN_EARLY an outcome that is forgotten before its time leaves nothing behind
 *   FOLD_ALONE      a new owner does not keep from where on it has read outcomes
 *   UNREAD          a prepare is accepted although its half may be of a transaction that has ended meanwhile
 */
#define BORN 3
#define HORIZON 1
#define AHEAD 1                     /* how far ahead of the owner's clock an id may be born: the minute */
#define LATEST 6                    /* clocks show 1 to this */
#define PREPARES 4
#define NEVER 0

#define UNKNOWN 0
#define PENDING 1
#define ENDED 2

typedef Owner {
    byte clock;
    byte known;
    byte dated;                     /* its outcome */
    byte complete_from;             /* it knows all outcomes of ids that are born at this time or later */
    bit flight;                     /* a half is on its way to the log */
};
Owner it[3];
byte owner;                         /* the last one that acquired */
byte prepares;

/* The log: whether a half stands without a tombstone, and the outcome. */
bit standing;
byte outcome = NEVER;

#define YOUNG(o) (BORN + HORIZON >= it[o].clock && BORN <= it[o].clock + AHEAD)

#ifdef AGE_IGNORED
#define NEW(o) (it[o].known == UNKNOWN)
#else
#ifdef CLOCK_ALONE
#define NEW(o) (it[o].known == UNKNOWN && YOUNG(o))
#else
#define NEW(o) (it[o].known == UNKNOWN && YOUNG(o) && BORN >= it[o].complete_from)
#endif
#endif

#ifdef NO_MINUTE
#define REMEMBERED HORIZON
#else
#define REMEMBERED (HORIZON + AHEAD)
#endif

#ifdef END_ALONE
#define FORGOTTEN(o) it[o].dated
#else
#define FORGOTTEN(o) BORN
#endif

inline forget(o) {
    if
    :: FORGOTTEN(o) >= it[o].complete_from -> it[o].complete_from = FORGOTTEN(o) + 1
    :: else
    fi;
    it[o].known = UNKNOWN; it[o].dated = 0
}

proctype Serve(byte o) {
    byte now;
    /* Acquisition: outcomes that were written within the horizon and a minute are read. A stray stands for shorter. */
    atomic { owner == o - 1 -> select (now : 1 .. LATEST) }
    atomic { owner == o - 1 && (!standing || outcome == NEVER || outcome + REMEMBERED >= now) -> d_step {
        owner = o; it[o].clock = now;
#ifndef FOLD_ALONE
        it[o].complete_from = (now > HORIZON -> now - HORIZON : 0);
#endif
        if
        :: outcome != NEVER && outcome + REMEMBERED >= now -> it[o].known = ENDED; it[o].dated = outcome
        :: outcome == NEVER && standing -> it[o].known = PENDING
        :: else
        fi;
        now = 0 } }
end:
    do
    :: atomic { owner >= o && it[o].clock < LATEST -> it[o].clock++ }
    :: atomic { owner >= o && it[o].clock > 1 -> it[o].clock-- }

    /* A prepare of an id that is not known here, and young: by the owner, or by a former one that has not noticed it yet,
       but not later than the outcome is forgotten. */
    :: atomic { owner >= o && (owner == o || it[owner].known != UNKNOWN || outcome == NEVER) && !it[o].flight && prepares < PREPARES && NEW(o) -> d_step { it[o].flight = 1; prepares++ } }
    /* Kafka appends it, and the owner's tail applies it, unless the id is known. Or it certainly stores nothing. */
    :: atomic { it[o].flight -> d_step {
        it[o].flight = 0; standing = 1;
        if
#ifdef UNREAD
        :: it[owner].known != PENDING -> it[owner].known = PENDING; it[owner].dated = 0
#else
        :: it[owner].known == UNKNOWN -> it[owner].known = PENDING
#endif
        :: else                     /* a repeat, or a stray */
        fi } }
    :: atomic { it[o].flight -> it[o].flight = 0 }
    /* The owner writes a tombstone over a stray. */
    :: atomic { owner == o && standing && it[o].known != PENDING -> standing = 0 }

    /* An end, by anybody. Only the owner's lane can write it, and its clock is not a minute behind the birth of the id. */
    :: atomic { owner == o && it[o].known == PENDING && it[o].clock + AHEAD >= BORN -> d_step {
        assert(outcome == NEVER); /* an id is decided twice */
        outcome = it[o].clock; it[o].known = ENDED; it[o].dated = outcome; standing = 0 } }

    /* The outcome is forgotten when it is older than the horizon and a minute. Late halves have arrived by then. */
    :: atomic { it[o].known == ENDED && !standing && !it[1].flight && !it[2].flight && \
        it[o].dated + REMEMBERED < it[o].clock -> d_step { forget(o) } }
    /* Or because there are too many. */
    :: atomic { it[o].known == ENDED && !standing && !it[1].flight && !it[2].flight -> d_step {
#ifdef FORGOTTEN_EARLY
        it[o].known = UNKNOWN; it[o].dated = 0
#else
        forget(o)
#endif
        } }
    od
}

init {
    atomic { run Serve(1); run Serve(2) }
}
