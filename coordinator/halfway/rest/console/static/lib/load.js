// What a view has loaded. A failed reload keeps what is shown, marked as stale, and tries again by itself.

import { useCallback, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { Problem, unreachable } from "./api.js";
import { useLive } from "./live.js";

const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 15;

const NOTHING = { data: null, problem: null, at: null, loading: true };

// `load(signal)` returns the data; it runs again when one of `inputs` changes, after `everyS(data)` seconds if that is
// a number, and when the coordinator is back. `problem` is null while `data` is as fresh as it should be.
export function useLoad(load, inputs, { everyS = () => null } = {}) {
  const [shown, setShown] = useState(NOTHING);
  const [turn, setTurn] = useState(0);
  const { connections } = useLive();
  const latest = useRef(null);
  latest.current = { load, everyS };
  const reload = useCallback(() => setTurn((before) => before + 1), []);

  const identity = JSON.stringify(inputs);
  const last = useRef(identity);
  useEffect(() => {
    const stopper = new AbortController();
    let timer = null;
    let failures = 0;
    if (last.current !== identity) {
      last.current = identity;
      setShown(NOTHING);
    } else {
      setShown((before) => ({ ...before, loading: true }));
    }
    const run = async () => {
      let next = null;
      try {
        const data = await latest.current.load(stopper.signal);
        if (stopper.signal.aborted) return;
        failures = 0;
        setShown({ data, problem: null, at: Date.now(), loading: false });
        next = latest.current.everyS(data);
      } catch (error) {
        if (stopper.signal.aborted) return;
        const problem = error instanceof Problem ? error : unreachable();
        setShown((before) => ({ ...before, problem, loading: false }));
        if (problem.passes) next = problem.retryAfterS ?? Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** failures);
        failures += 1;
      }
      if (next !== null) timer = setTimeout(run, next * 1000);
    };
    void run();
    return () => {
      stopper.abort();
      clearTimeout(timer);
    };
  }, [identity, turn, connections]);
  return { ...shown, reload };
}
