/*
 * Check-back and policy for one transaction of a group with `on_exhausted: rollback`, as in docs/protocol.md: checks
 * that are pushed or fetched, verdicts, callers (a producer, an operator), giving up, parking and resuming, one write at
 * a time under the claim of the id. A caller whose commit is refused is answered when the commit is recorded, or late.
 * `make model` checks it exhaustively; docs/protocol.md says what is modelled.
 *
 * The instance's memory is lost when it dies, and kept when only its lane fails. The log then contains the outcome of a
 * write under way. Ownership is modelled in halfway.pml.
 *
 * Each of these mutants leaves out one rule of the protocol, and the check must find an error in it:
 *   STALE            policy does not decide again under the claim, nor when its Kafka transaction begins, although a
 *                    verdict may have arrived in the meantime
 *   NOT_AT_BEGIN     policy does not decide again when its Kafka transaction begins
 *   PULLED_FORGOTTEN the commit verdict of a fetched check is forgotten if it cannot be written
 *   PUSHED_FORGOTTEN the commit verdict of a pushed check is forgotten if it cannot be written
 *   CALLER_FORGOTTEN the commit of a caller is forgotten if it cannot be written
 *   EARLY_REFUSAL    a caller is told that its commit is refused before the commit is recorded
 *   CHECKED_FORGETS  a later record of a check does not contain the verdict
 *   RESUME_FORGETS   a resumed transaction has forgotten the verdict
 *   PARK_FORGETS     a verdict that arrives while the transaction is parked is not recorded
 *   AGE_ALONE        policy rolls back by age although no check was sent
 *   UNDER_WAY        policy gives up while a check is under way
 *   LEASE_IGNORED    policy gives up during the lease of a fetched check
 */
#ifndef CHECKS                      /* max_checks */
#define CHECKS 2
#endif
#ifndef LOSSES                      /* how often the lane is lost, and the instance dies */
#define LOSSES 2
#endif
#ifndef RESUMES
#define RESUMES 1
#endif

#define NOTHING 0
#define COMMIT 1
#define ROLLBACK 2
#define PARK 3
#define NOTE 4                      /* a check was sent: CHECKED */
#define VERDICT 5                   /* a check or a caller said commit: VERDICT, or parked again */
#define RESUME 6

#define PENDING 0
#define PARKED 1
#define ENDED 2

mtype = { free, claimed, queued, begun };
mtype = { nobody, caller, check, policy, operator };

/* The log: the last records of the transaction. */
byte log_state;
byte log_outcome;
byte log_checks;
bit log_verdict;
bit log_leased;                     /* the last recorded check was fetched, and its lease is not over */

/* The instance: its fold, */
byte state;
byte checks;
bit verdict;
bit leased;
/* what it remembers beside it, */
bit said;                           /* a check or a caller said commit, which is not recorded yet */
bit asked;                          /* a check is under way: sent, and its answer not handled */

bit to_commit, to_rollback, to_note, to_record; /* verdicts of checks that wait for the claim */
bit to_commit_pulled, noting_lease;
bit calls;                          /* a caller's commit waits for the claim */
bit refused;                        /* a caller's commit was refused, and its answer waits for the record */
byte given_up;                      /* the decision of the policy, which waits for the claim: PARK, ROLLBACK */
/* and the write that has the claim. */
mtype stage = free;
mtype who = nobody;
byte act;
bit pulled;                         /* it is the answer to a check that was fetched */

bit pull;                           /* the group's mode */
bit aged;                           /* it is older than max_age_s */
byte out;                           /* fetched checks that may still be answered */
byte losses, resumes;

/* Ghost variables. */
bit commit_said;                    /* a check or a caller said commit, and it is remembered somewhere */
bit promised;                       /* a caller was told that its commit is refused: the log must hold it */
bit has_called;                     /* a caller said commit */
bit was_asked;                      /* a check was sent */

inline read_log() { state = log_state; checks = log_checks; verdict = log_verdict; leased = log_leased }
inline let_go() { stage = free; who = nobody; act = NOTHING; pulled = 0 }
inline take(whose, what) { stage = claimed; who = whose; act = what }

#ifdef AGE_ALONE
#define ASKED_ENOUGH true
#else
#define ASKED_ENOUGH (checks > 0)
#endif
#ifdef LEASE_IGNORED
#define HAS_LEASE false
#else
#define HAS_LEASE leased
#endif
#define IS_EXHAUSTED ((aged || checks >= CHECKS) && !HAS_LEASE)
#define GIVES_UP (!verdict && ASKED_ENOUGH -> ROLLBACK : PARK)

/* The policy decides the same again: no check is under way, and none returned commit. */
#ifdef UNDER_WAY
#define AWAITS said
#else
#define AWAITS (said || asked)
#endif
#ifdef STALE
#define STILL (state == PENDING && !asked && !leased)
#define AT_BEGIN true
#else
#define STILL (state == PENDING && !AWAITS && IS_EXHAUSTED && act == GIVES_UP)
#ifdef NOT_AT_BEGIN
#define AT_BEGIN true
#else
#define AT_BEGIN (!(who == policy && said))
#endif
#endif

/* The records of a write, once its Kafka transaction is committed. */
inline write_log() {
    if
    :: act == COMMIT || act == ROLLBACK ->
        assert(log_outcome == NOTHING);     /* decided twice */
        assert(who != policy || !commit_said || pull || has_called); /* against a verdict that was pushed meanwhile */
        log_outcome = act; log_state = ENDED
    :: act == PARK -> log_state = PARKED; log_verdict = verdict
    :: act == NOTE ->
        log_checks = (checks < CHECKS -> checks + 1 : checks); log_leased = (noting_lease && leased);
#ifdef CHECKED_FORGETS
        log_verdict = 0
#endif
    :: act == VERDICT ->
        log_checks = (checks < CHECKS -> checks + 1 : checks); log_verdict = 1
    :: act == RESUME ->
        log_state = PENDING; log_checks = 0;
#ifdef RESUME_FORGETS
        log_verdict = 0;
#endif
        aged = 0
    fi
}

/* The caller, the check or the policy learns that it is written. */
inline answer() {
    read_log();
    if
    :: refused && act == VERDICT -> refused = 0; promised = 1
    :: else
    fi;
    if
    :: act == COMMIT || act == ROLLBACK || act == VERDICT -> said = 0
    :: else
    fi;
    if
    :: who == check && !pulled -> asked = 0
    :: act == NOTE -> noting_lease = 0
    :: else
    fi;
    let_go()
}

/* It cannot be written, for example because the topic is missing. The commit is recorded as a verdict. */
inline refuse_write() {
    if
    :: who == caller && act == COMMIT ->
#ifdef CALLER_FORGOTTEN
        said = 0
#else
        to_record = 1; refused = 1;
#ifdef EARLY_REFUSAL
        promised = 1
#endif
#endif
    :: who == check && act == COMMIT ->
#ifdef PUSHED_FORGOTTEN
        if
        :: !pulled -> said = 0
        :: else
        fi;
#endif
        to_record = said;
        if
        :: pulled
        :: else -> asked = 0
        fi
    :: else
    fi;
    let_go()
}

/* The writer finds the transaction ended or parked under the claim. */
inline overtaken() {
    if
    :: who == check && !pulled -> asked = 0
    :: else
    fi;
    if
    :: state == ENDED -> said = 0; to_record = 0; refused = 0
    :: state != ENDED && act == VERDICT && verdict ->    /* it is recorded already */
        said = 0;
        if
        :: refused -> refused = 0; promised = 1
        :: else
        fi
    :: else
    fi;
    let_go()
}

proctype Instance() {
end:
    do
    /* --- checks */
    :: atomic { !pull && state == PENDING && !asked && stage == free && checks < CHECKS ->
        asked = 1; was_asked = 1 }
    :: atomic { asked && !to_commit && !to_rollback && !to_note && !(who == check) ->
        if
        :: said = 1; commit_said = 1; to_commit = 1
        :: to_rollback = 1
        :: to_note = 1
        fi }
    :: atomic { pull && state == PENDING && stage == free && checks < CHECKS && !leased && out < 2 && !to_note ->
        out++; leased = 1; was_asked = 1; to_note = 1; noting_lease = 1 }
    :: atomic { leased || log_leased -> leased = 0; log_leased = 0 }    /* the lease is over */
    :: atomic { out > 0 && !to_commit && !to_rollback && state != ENDED -> out--;
        if
        :: commit_said = 1; to_commit = 1; to_commit_pulled = 1;
#ifndef PULLED_FORGOTTEN
            said = 1
#endif
        :: skip
        fi }
    :: atomic { !aged && state == PENDING -> aged = 1 }

    /* --- a caller says commit, perhaps while another write has the claim; a late refusal promises nothing */
    :: atomic { !calls && !refused && state != ENDED -> calls = 1; said = 1; commit_said = 1; has_called = 1 }
    :: atomic { refused -> refused = 0 }

    /* --- the scan: the policy decides, if the id is not claimed and no verdict is kept */
    :: atomic { state == PENDING && stage == free && given_up == NOTHING && !said && IS_EXHAUSTED -> given_up = GIVES_UP }
    /* kept verdicts are tried again */
    :: atomic { said && !to_record && stage == free && !to_commit && !calls -> to_record = 1 }

    /* --- the claim: one at a time, in any order */
    :: atomic { stage == free && to_commit -> to_commit = 0; pulled = to_commit_pulled; to_commit_pulled = 0;
        take(check, COMMIT) }
    :: atomic { stage == free && to_rollback -> to_rollback = 0; take(check, ROLLBACK) }
    :: atomic { stage == free && to_note -> to_note = 0; pulled = noting_lease; take(check, NOTE) }
    :: atomic { stage == free && to_record -> to_record = 0; pulled = 1; take(check, VERDICT) }
    :: atomic { stage == free && given_up != NOTHING -> take(policy, given_up); given_up = NOTHING }
    :: atomic { stage == free && state != ENDED -> take(caller, ROLLBACK) }
    :: atomic { stage == free && calls -> calls = 0; take(caller, COMMIT) }
    :: atomic { stage == free && state == PARKED && resumes < RESUMES -> resumes++; take(operator, RESUME) }

    /* --- under the claim: the write depends on the current state */
    :: atomic { stage == claimed ->
        if
        :: state == ENDED || (act == NOTE && state == PARKED) || (act == RESUME && state == PENDING) ||
            (act == VERDICT && verdict) -> overtaken()
#ifdef PARK_FORGETS
        :: act == VERDICT && state == PARKED -> said = 0; let_go()
        :: else ->
#else
        :: else ->
#endif
            if
            :: who == policy && !STILL -> let_go()
            :: else -> stage = queued
            fi
        fi }

    /* --- the lane: the write may be no longer current, or a commit refused; else it begins */
    :: atomic { stage == queued && !AT_BEGIN -> stage = claimed }
    :: atomic { stage == queued && act == COMMIT -> refuse_write() }
    :: atomic { stage == queued && AT_BEGIN ->
        assert(who != policy || act != ROLLBACK || !commit_said);    /* policy rolls back against a verdict */
        assert(who != policy || act != ROLLBACK || !promised);       /* policy rolls back against a promise */
        assert(who != policy || act != ROLLBACK || was_asked);       /* policy rolls back without a check */
        assert(who != policy || !asked);                             /* policy gives up while a check is under way */
        assert(who != policy || !leased);                            /* policy gives up before a check's lease is over */
        stage = begun }
    :: atomic { stage == begun -> write_log(); answer() }
    /* The lane is lost with the write: it may be written, and is tried again under the same claim. */
    :: atomic { stage == begun && losses < LOSSES -> losses++;
        if
        :: write_log(); read_log(); stage = claimed
        :: read_log(); stage = claimed
        fi }
    /* The instance dies, or others get the shard. */
    :: atomic { losses < LOSSES -> losses++;
        if
        :: stage == begun -> write_log()
        :: skip
        fi;
        read_log(); let_go();
        said = 0; asked = 0; to_commit = 0; to_rollback = 0; to_note = 0; to_record = 0; to_commit_pulled = 0;
        calls = 0; refused = 0; noting_lease = 0; given_up = NOTHING; commit_said = log_verdict }
    od
}

init {
    atomic {
        if
        :: pull = 0
        :: pull = 1
        fi;
        run Instance()
    }
}
