// Loads the data of a view. If a reload fails, the old data stays, marked as stale, and the load is tried again.

import { useCallback, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { Problem, unreachable } from "./api.js";
import { useLive } from "./live.js";

const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 15;

const INITIAL = { data: null, problem: null, at: null, loading: true };

// `load(signal)` returns the data. It runs again when one of `inputs` changes, after `everyS(data)` seconds if that is
// a number, and when the connection to the coordinator is back. `problem` is null while `data` is fresh.
export function useLoad(load, inputs, { everyS = () => null } = {}) {
  const [result, setResult] = useState(INITIAL);
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
      setResult(INITIAL);
    } else {
      setResult((before) => ({ ...before, loading: true }));
    }
    const run = async () => {
      let waitS = null;
      try {
        const data = await latest.current.load(stopper.signal);
        if (stopper.signal.aborted) return;
        failures = 0;
        setResult({ data, problem: null, at: Date.now(), loading: false });
        waitS = latest.current.everyS(data);
      } catch (error) {
        if (stopper.signal.aborted) return;
        const problem = error instanceof Problem ? error : unreachable();
        setResult((before) => ({ ...before, problem, loading: false }));
        if (problem.isTransient) waitS = problem.retryAfterS ?? Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** failures);
        failures += 1;
      }
      if (waitS !== null) timer = setTimeout(run, waitS * 1000);
    };
    void run();
    return () => {
      stopper.abort();
      clearTimeout(timer);
    };
  }, [identity, turn, connections]);
  return { ...result, reload };
}
