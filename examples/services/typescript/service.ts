// An order service in TypeScript, to copy: the transaction, the barrier and the check endpoint. ../README.md says how to run it.
import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { createServer, type IncomingHttpHeaders, type IncomingMessage } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";

const { HALFWAY_URL = "http://127.0.0.1:8080", HALFWAY_KEY = "", GROUP = "shop", TOPIC = "orders" } = process.env;
const { DATABASE_URL = "postgresql://localhost/shop", PORT = "9000" } = process.env;
const { CHECK_URL = `http://127.0.0.1:${PORT}/check` } = process.env;
const ATTEMPTS = 7;
const ATTEMPT_MS = 3_000;
const RETENTION_S = 7 * 86_400; // at least twice the group's max_age_s
const TOLERANCE_S = 300;
const MAX_BODY_BYTES = 32 * 1024 * 1024;

/** Of what is known. Anything else, such as a parked transaction, is 503: it may be in the database or not. */
const STATUS: Record<string, number> = { commit: 200, committed: 200, rollback: 409, rolled_back: 409 };

type Outcome = "commit" | "rollback" | "unknown";
type Order = { id: string; total: number; at?: number };
type Answer = [status: number, body: object];

// --- The transaction

/** Call halfway until the answer is final. Every call here may be repeated: a repeat of one that took effect changes nothing. */
async function call(method: string, path: string, body?: object): Promise<Record<string, any>> {
  let failure = "";
  for (let attempt = 1; attempt <= ATTEMPTS; attempt++) {
    try {
      const answer = await fetch(`${HALFWAY_URL}/v1${path}`, {
        method,
        headers: { "Content-Type": "application/json", ...(HALFWAY_KEY && { Authorization: `Bearer ${HALFWAY_KEY}` }) },
        body: body === undefined ? null : JSON.stringify(body),
        signal: AbortSignal.timeout(ATTEMPT_MS), // a kept connection may have died silently; the next attempt uses a new one
      });
      const text = await answer.text();
      if (answer.ok) return JSON.parse(text);
      failure = `${answer.status} ${text}`;
      if (answer.status < 500 && answer.status !== 429) break;
    } catch (error) {
      failure = String(error);
    }
    await sleep(100 * 2 ** attempt);
  }
  throw new Error(`${method} ${path}: ${failure}`);
}

/** The id of a transaction, derived from a key and a time in milliseconds since 1970 (docs/api.md, Ids): a repeat has the same. */
function transactionId(key: string, at: number): string {
  const bytes = Buffer.alloc(16);
  bytes.writeUIntBE(at, 0, 6);
  createHash("sha256").update(key).digest().copy(bytes, 6, 0, 10);
  bytes[6] = (bytes[6]! & 0x0f) | 0x70;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  return bytes.toString("hex").replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

async function placeOrder(order: Order): Promise<Answer> {
  const id = transactionId(`shop/order/${order.id}`, order.at ?? Date.now());
  const value = { type: "JSON", data: { order: order.id, total: order.total } };
  // 1. The messages are stored, invisible to consumers. Without a confirmed `prepared` the local transaction must not run.
  let state: string;
  try {
    const messages = [{ topic: TOPIC, key: order.id, value }];
    state = (await call("POST", "/transactions", { group: GROUP, id, messages })).state;
  } catch (error) {
    return [503, { id, error: String(error) }]; // if it is stored all the same, a check rolls it back
  }
  if (state !== "prepared") return [STATUS[state] ?? 503, { id, state }];
  // 2. The local transaction. If anything fails in it, even the answer of the commit, the barrier says what became of it.
  let outcome: Outcome;
  let status: number;
  try {
    await placeInDatabase(id, order);
    [outcome, status] = ["commit", 201];
  } catch (error) {
    console.error(`order ${order.id}:`, error);
    outcome = await decide(id);
    status = STATUS[outcome] ?? 503;
  }
  // 3. The end. If it is lost, halfway sends a check.
  if (outcome !== "unknown") {
    await call("POST", `/transactions/${id}/end`, { outcome }).catch((error) => console.error("left to check-back:", error));
  }
  return [status, { id, outcome }];
}

async function placeInDatabase(id: string, order: Order): Promise<void> {
  const connection = await orders.connect();
  let failed = true;
  try {
    await connection.query("BEGIN");
    // The first statement: from here on a check waits for this transaction. No row was written if a check came before.
    const { rowCount } = await connection.query(INSERT, [id, "commit"]);
    if (rowCount === 0) throw new Error(`${id} is decided already`);
    await connection.query("INSERT INTO orders (id, total) VALUES ($1, $2)", [order.id, order.total]);
    const { command } = await connection.query("COMMIT");
    if (command !== "COMMIT") throw new Error(`the commit was answered ${command}`); // without an error if a statement failed
    failed = false;
  } finally {
    connection.release(failed); // true closes the connection, which rolls back what is open
  }
}

// --- The barrier: the statements of adapters/halfway/client/barrier/sql/postgresql.sql, which gives the reason of each clause

const CREATE = [
  `CREATE TABLE IF NOT EXISTS halfway_barrier (
    transaction_id varchar(128) COLLATE "C" PRIMARY KEY,
    outcome varchar(8) NOT NULL,
    decided_at timestamptz NOT NULL DEFAULT clock_timestamp())`,
  `CREATE INDEX IF NOT EXISTS halfway_barrier_decided_at ON halfway_barrier (decided_at)`,
];
const INSERT = `INSERT INTO halfway_barrier (transaction_id, outcome) VALUES ($1, $2) ON CONFLICT (transaction_id) DO NOTHING`;
const TAKE_PLACE = `WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '500', true))
  INSERT INTO halfway_barrier (transaction_id, outcome) SELECT $1, $2 FROM bound ON CONFLICT (transaction_id) DO NOTHING`;
const LOOK = `SELECT outcome FROM halfway_barrier WHERE transaction_id = $1`;
const CLEAN = `WITH elected AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(hashtext('halfway_barrier')) AS mine)
  DELETE FROM halfway_barrier WHERE (SELECT mine FROM elected) AND (transaction_id) IN (
    SELECT transaction_id FROM halfway_barrier WHERE decided_at < now() - $1 * interval '1 second'
    ORDER BY decided_at LIMIT $2)`;

/** A connection that was dropped silently fails in five seconds; else a few of them would use up a pool. */
const POOL = { connectionString: DATABASE_URL, connectionTimeoutMillis: 2_000, query_timeout: 5_000, keepAlive: true };
const orders = new pg.Pool({ ...POOL, max: 10 });
/** For checks: orders cannot use these connections up. */
const checks = new pg.Pool({ ...POOL, max: 4 });
for (const pool of [orders, checks]) {
  pool.on("error", (error) => console.error("an idle connection was lost:", error.message));
  pool.on("connect", (connection) => connection.on("error", () => {})); // else one that is lost in use ends the process
}

async function look(id: string): Promise<Outcome | undefined> {
  return (await checks.query(LOOK, [id])).rows[0]?.outcome;
}

/** Return the outcome of a transaction. If there is none yet, a rollback is stored, so that the order can never commit. */
async function decide(id: string, preparedAt?: string): Promise<Outcome> {
  try {
    const outcome = await look(id);
    if (outcome !== undefined) return outcome;
    const ageS = preparedAt === undefined ? 0 : (Date.now() - Date.parse(preparedAt)) / 1_000;
    if (!(ageS <= RETENTION_S / 2)) return "unknown"; // its row may have been deleted
    await checks.query(TAKE_PLACE, [id, "rollback"]);
    return (await look(id)) ?? "unknown"; // only a committed row is an answer
  } catch (error) {
    console.error(`${id} cannot be decided now:`, error); // usually because the local transaction is still open
    return "unknown";
  }
}

async function clean(): Promise<void> {
  try {
    while ((await checks.query(CLEAN, [RETENTION_S, 100])).rowCount === 100) await sleep(100);
  } catch (error) {
    console.error("old rows of the barrier were not deleted:", error);
  }
}

// --- The check endpoint

let secrets: Buffer[] = [];

/** Fetch what halfway signs this group's checks with. Without a key, halfway does not sign, and anybody can send checks. */
async function fetchSecrets(): Promise<void> {
  if (HALFWAY_KEY === "") return;
  const answer = await call("GET", `/groups/${GROUP}/check-secrets`);
  secrets = answer.secrets.map((secret: string) => Buffer.from(secret.replace(/^whsec_/, ""), "base64"));
}

/** Return whether halfway has signed this body within the last five minutes (Standard Webhooks). */
function isSigned(body: Buffer, headers: IncomingHttpHeaders): boolean {
  if (HALFWAY_KEY === "") return true;
  const [id, timestamp] = [String(headers["webhook-id"]), String(headers["webhook-timestamp"])];
  if (!(Math.abs(Date.now() / 1_000 - Number(timestamp)) <= TOLERANCE_S)) return false;
  const signatures = String(headers["webhook-signature"]).split(" "); // several during a rotation
  return secrets.some((secret) => {
    const expected = createHmac("sha256", secret).update(`${id}.${timestamp}.`).update(body).digest();
    return signatures.some((signature) => {
      const given = Buffer.from(signature.replace(/^v1,/, ""), "base64");
      return signature.startsWith("v1,") && given.length === expected.length && timingSafeEqual(given, expected);
    });
  });
}

async function answerCheck(body: Buffer, headers: IncomingHttpHeaders): Promise<Answer> {
  if (!isSigned(body, headers)) return [401, { error: "halfway has not signed this check" }];
  const check = JSON.parse(body.toString());
  // The nonce binds this answer to this check.
  return [200, { outcome: await decide(check.id, check.prepared_at), nonce: check.nonce }];
}

// --- The server

async function bodyOf(request: IncomingMessage): Promise<Buffer> {
  const parts: Buffer[] = [];
  let length = 0;
  for await (const part of request) {
    length += part.length;
    if (length > MAX_BODY_BYTES) throw new Error("the body is too large");
    parts.push(part);
  }
  return Buffer.concat(parts);
}

async function answer(request: IncomingMessage): Promise<Answer> {
  const body = await bodyOf(request);
  if (request.method === "POST" && request.url === "/check") return answerCheck(body, request.headers);
  if (request.method === "POST" && request.url === "/orders") return placeOrder(JSON.parse(body.toString()));
  return [404, { error: "POST /orders or /check" }];
}

const server = createServer((request, response) => {
  answer(request)
    .catch((error): Answer => [400, { error: String(error) }])
    .then(([status, body]) => response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(body)));
});

for (const statement of CREATE) await orders.query(statement); // a service with migrations has them there
await orders.query("CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, total double precision NOT NULL)");
// PATCH takes nothing away from a newer release, or from what an operator has set.
await call("PATCH", `/groups/${GROUP}`, { check: { urls: [CHECK_URL] }, topics: [TOPIC] });
await fetchSecrets();
await clean();
setInterval(clean, 3_600_000);
server.listen(Number(PORT), "127.0.0.1");
