// An order service in Java 17, to copy: the transaction, the barrier and the check endpoint. ../README.md says how to run it.

import com.google.gson.*;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.*;
import java.net.http.*;
import java.net.http.HttpRequest.BodyPublishers;
import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.sql.*;
import java.time.Duration;
import java.time.Instant;
import java.util.*;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.function.UnaryOperator;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;

import static java.nio.charset.StandardCharsets.UTF_8;

public class Service {
    static final int ATTEMPTS = 7;
    static final Duration ATTEMPT = Duration.ofSeconds(3);
    static final Duration RETENTION = Duration.ofDays(7); // at least twice the group's max_age_s
    static final Duration TOLERANCE = Duration.ofMinutes(5);
    static final int MAX_BODY_BYTES = 32 << 20;
    static final String HALFWAY = env("HALFWAY_URL", "http://127.0.0.1:8080");
    static final String KEY = env("HALFWAY_KEY", "");
    static final String GROUP = env("GROUP", "shop");
    static final String TOPIC = env("TOPIC", "orders");
    static final String PORT = env("PORT", "9000");
    /** Of what is known. Anything else, such as a parked transaction, is 503: it may be in the database or not. */
    static final Map<String, Integer> STATUS = Map.of("commit", 200, "committed", 200, "rollback", 409, "rolled_back", 409);
    static final Gson GSON = new Gson();
    static final List<byte[]> SECRETS = new ArrayList<>();
    static volatile HttpClient http = newClient();

    record Answer(int status, Object body) {}

    static String env(String name, String otherwise) { return System.getenv().getOrDefault(name, otherwise); }

    // --- The transaction

    static HttpClient newClient() { return HttpClient.newBuilder().connectTimeout(ATTEMPT).version(HttpClient.Version.HTTP_1_1).build(); }

    /**
     * Call halfway until the answer is final. Every call here may be repeated: a repeat of one that took effect changes
     * nothing. A kept connection may have died silently, so an attempt is short, and the next one uses new connections.
     */
    static JsonObject call(String method, String path, Object body) throws Exception {
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(HALFWAY + "/v1" + path)).timeout(ATTEMPT)
                .header("Content-Type", "application/json")
                .method(method, body == null ? BodyPublishers.noBody() : BodyPublishers.ofString(GSON.toJson(body)));
        if (!KEY.isEmpty()) request.header("Authorization", "Bearer " + KEY);
        String failure = "";
        for (int attempt = 1; attempt <= ATTEMPTS; attempt++) {
            try {
                HttpResponse<String> answer = http.send(request.build(), HttpResponse.BodyHandlers.ofString());
                if (answer.statusCode() < 300) return parse(answer.body().getBytes(UTF_8));
                failure = answer.statusCode() + " " + answer.body();
                if (answer.statusCode() < 500 && answer.statusCode() != 429) break;
            } catch (IOException error) {
                failure = error.toString();
                http = newClient();
            }
            Thread.sleep(100L << attempt);
        }
        throw new IOException(method + " " + path + ": " + failure);
    }

    /** The id of a transaction, derived from a key and a time in milliseconds (docs/api.md, Ids): a repeat has the same. */
    static String transactionId(String key, long at) throws Exception {
        ByteBuffer hash = ByteBuffer.wrap(MessageDigest.getInstance("SHA-256").digest(key.getBytes(UTF_8)));
        long high = at << 16 | 0x7000 | hash.getShort() & 0x0fff;
        long low = hash.getLong() & 0x3fffffffffffffffL | 0x8000000000000000L;
        return new UUID(high, low).toString();
    }

    static JsonObject parse(byte[] body) { return JsonParser.parseString(new String(body, UTF_8)).getAsJsonObject(); }

    static Answer placeOrder(JsonObject order) throws Exception {
        String number = order.get("id").getAsString();
        double total = order.get("total").getAsDouble();
        long at = order.has("at") ? order.get("at").getAsLong() : System.currentTimeMillis();
        String id = transactionId("shop/order/" + number, at);
        // 1. The messages are stored, invisible to consumers. Without a confirmed `prepared` the local transaction must not run.
        String state;
        try {
            state = prepare(id, messages(number, total));
        } catch (IOException error) {
            return new Answer(503, Map.of("id", id, "error", error.toString())); // if it is stored, a check rolls it back
        }
        if (!state.equals("prepared")) return new Answer(STATUS.getOrDefault(state, 503), Map.of("id", id, "state", state));
        // 2. The local transaction. If anything fails in it, even the answer of the commit, the barrier says what became of it.
        String outcome = "commit";
        int status = 201;
        try {
            placeInDatabase(id, number, total);
        } catch (SQLException error) {
            System.err.println("order " + number + ": " + error);
            outcome = decide(id, Instant.now());
            status = STATUS.getOrDefault(outcome, 503);
        }
        // 3. The end. If it is lost, halfway sends a check.
        end(id, outcome);
        return new Answer(status, Map.of("id", id, "outcome", outcome));
    }

    static List<?> messages(String number, double total) {
        JsonObject data = new JsonObject(); // the same bytes each time: Map.of has another order in each process
        data.addProperty("order", number);
        data.addProperty("total", total);
        return List.of(Map.of("topic", TOPIC, "key", number, "value", Map.of("type", "JSON", "data", data)));
    }

    static String prepare(String id, List<?> messages) throws Exception {
        return call("POST", "/transactions", Map.of("group", GROUP, "id", id, "messages", messages)).get("state").getAsString();
    }

    static void end(String id, String outcome) throws Exception {
        if (outcome.equals("unknown")) return;
        try {
            call("POST", "/transactions/" + id + "/end", Map.of("outcome", outcome));
        } catch (IOException | RuntimeException error) {
            System.err.println("left to check-back: " + error);
        }
    }

    static void placeInDatabase(String id, String number, double total) throws SQLException {
        try (Connection connection = connect()) { // the end of the block rolls back what has not committed
            connection.setAutoCommit(false);
            // The first statement: from here on a check waits for this transaction. No row was written if a check came before.
            if (execute(connection, INSERT, id, "commit") == 0) throw new SQLException(id + " is decided already");
            execute(connection, "INSERT INTO orders (id, total) VALUES (?, ?)", number, total);
            commit(connection, id);
        }
    }

    /** JDBC's commit of PostgreSQL returns as if it had succeeded if an error, although caught, has undone everything. */
    static void commit(Connection connection, String id) throws SQLException {
        if (!"commit".equals(look(connection, id))) throw new SQLException("a rollback to a savepoint has undone " + id);
        connection.commit();
    }

    // --- The barrier: the statements of adapters/halfway/client/barrier/sql/postgresql.sql, which gives the reason of each clause

    static final List<String> CREATE = List.of("""
            CREATE TABLE IF NOT EXISTS halfway_barrier (
              transaction_id varchar(128) COLLATE "C" PRIMARY KEY,
              outcome varchar(8) NOT NULL,
              decided_at timestamptz NOT NULL DEFAULT clock_timestamp())""", """
            CREATE INDEX IF NOT EXISTS halfway_barrier_decided_at ON halfway_barrier (decided_at)""");
    static final String INSERT = """
            INSERT INTO halfway_barrier (transaction_id, outcome) VALUES (?, ?) ON CONFLICT (transaction_id) DO NOTHING""";
    static final String TAKE_PLACE = """
            WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '500', true))
              INSERT INTO halfway_barrier (transaction_id, outcome) SELECT ?, ? FROM bound ON CONFLICT (transaction_id) DO NOTHING""";
    static final String LOOK = """
            SELECT outcome FROM halfway_barrier WHERE transaction_id = ?""";
    static final String CLEAN = """
            WITH elected AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(hashtext('halfway_barrier')) AS mine)
              DELETE FROM halfway_barrier WHERE (SELECT mine FROM elected) AND (transaction_id) IN (
                SELECT transaction_id FROM halfway_barrier WHERE decided_at < now() - ? * interval '1 second'
                ORDER BY decided_at LIMIT ?)""";

    /** Names no statement on the server, for pgbouncer. If you use a pool, give checks one of their own. */
    static Connection connect() throws SQLException { return DriverManager.getConnection(jdbcUrl()); }

    static String jdbcUrl() {
        URI url = URI.create(env("DATABASE_URL", "postgresql://localhost:5432/shop"));
        String user = url.getUserInfo() == null ? "" : "&user=" + url.getUserInfo().replaceFirst(":", "&password=");
        return "jdbc:postgresql://" + url.getAuthority().replaceFirst(".*@", "") + url.getPath()
                + "?connectTimeout=2&prepareThreshold=0" + user;
    }

    static int execute(Connection connection, String sql, Object... parameters) throws SQLException {
        try (PreparedStatement statement = connection.prepareStatement(sql)) {
            for (int index = 0; index < parameters.length; index++) statement.setObject(index + 1, parameters[index]);
            return statement.executeUpdate();
        }
    }

    /** Return the outcome, null if there is none yet. */
    static String look(Connection connection, String id) throws SQLException {
        try (PreparedStatement statement = connection.prepareStatement(LOOK)) {
            statement.setString(1, id);
            ResultSet rows = statement.executeQuery();
            return rows.next() ? rows.getString(1) : null;
        }
    }

    /** Return the outcome of a transaction. If there is none yet, a rollback is stored, so that the order can never commit. */
    static String decide(String id, Instant preparedAt) {
        try (Connection connection = connect()) { // it commits each statement
            String outcome = look(connection, id);
            if (outcome != null) return outcome;
            if (preparedAt.isBefore(Instant.now().minus(RETENTION.dividedBy(2)))) return "unknown"; // its row may be deleted
            execute(connection, TAKE_PLACE, id, "rollback");
            outcome = look(connection, id); // only a committed row is an answer
            return outcome == null ? "unknown" : outcome;
        } catch (SQLException error) {
            System.err.println(id + " cannot be decided now: " + error); // usually the local transaction is still open
            return "unknown";
        }
    }

    static void clean() {
        try (Connection connection = connect()) {
            while (execute(connection, CLEAN, (double) RETENTION.toSeconds(), 100) == 100) Thread.sleep(100);
        } catch (SQLException | InterruptedException error) {
            System.err.println("old rows of the barrier were not deleted: " + error);
        }
    }

    // --- The check endpoint

    /** Fetch what halfway signs this group's checks with. Without a key, halfway does not sign, and anybody can send checks. */
    static void fetchSecrets() throws Exception {
        if (KEY.isEmpty()) return;
        for (JsonElement secret : call("GET", "/groups/" + GROUP + "/check-secrets", null).getAsJsonArray("secrets"))
            SECRETS.add(Base64.getDecoder().decode(secret.getAsString().replaceFirst("^whsec_", "")));
    }

    /** Return whether halfway has signed this body within the last five minutes (Standard Webhooks). */
    static boolean isSigned(byte[] body, UnaryOperator<String> header) throws Exception {
        try {
            Instant sent = Instant.ofEpochSecond(Long.parseLong(header.apply("webhook-timestamp")));
            if (Duration.between(sent, Instant.now()).abs().compareTo(TOLERANCE) > 0) return false;
            String signed = header.apply("webhook-id") + "." + header.apply("webhook-timestamp") + ".";
            for (byte[] secret : SECRETS) {
                Mac mac = Mac.getInstance("HmacSHA256");
                mac.init(new SecretKeySpec(secret, "HmacSHA256"));
                mac.update(signed.getBytes(UTF_8));
                byte[] expected = mac.doFinal(body);
                for (String signature : header.apply("webhook-signature").split(" ")) { // several during a rotation
                    if (!signature.startsWith("v1,")) continue;
                    if (MessageDigest.isEqual(Base64.getDecoder().decode(signature.substring(3)), expected)) return true;
                }
            }
        } catch (IllegalArgumentException | NullPointerException malformed) {
            System.err.println("a check with malformed headers: " + malformed);
        }
        return false;
    }

    static Answer answerCheck(byte[] body, UnaryOperator<String> header) throws Exception {
        if (!KEY.isEmpty() && !isSigned(body, header)) return new Answer(401, Map.of("error", "halfway has not signed this check"));
        JsonObject check = parse(body);
        String outcome = decide(check.get("id").getAsString(), Instant.parse(check.get("prepared_at").getAsString()));
        // The nonce binds this answer to this check.
        return new Answer(200, Map.of("outcome", outcome, "nonce", check.get("nonce").getAsString()));
    }

    // --- The server

    interface Handler { Answer answer(byte[] body, UnaryOperator<String> header) throws Exception; }

    static void serve(HttpServer server, String path, Handler handler) {
        server.createContext(path, exchange -> {
            try (exchange) {
                Answer answer;
                try {
                    byte[] body = exchange.getRequestBody().readNBytes(MAX_BODY_BYTES);
                    answer = handler.answer(body, exchange.getRequestHeaders()::getFirst);
                } catch (Exception error) {
                    answer = new Answer(400, Map.of("error", error.toString()));
                }
                byte[] content = GSON.toJson(answer.body()).getBytes(UTF_8);
                exchange.getResponseHeaders().set("Content-Type", "application/json");
                exchange.sendResponseHeaders(answer.status(), content.length);
                exchange.getResponseBody().write(content);
            }
        });
    }

    static void register() throws Exception {
        try (Connection connection = connect()) {
            for (String statement : CREATE) execute(connection, statement); // a service with migrations has them there
            execute(connection, "CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, total double precision NOT NULL)");
        }
        // PATCH takes nothing away from a newer release, or from what an operator has set.
        Object check = Map.of("urls", List.of(env("CHECK_URL", "http://127.0.0.1:" + PORT + "/check")));
        call("PATCH", "/groups/" + GROUP, Map.of("check", check, "topics", List.of(TOPIC)));
        fetchSecrets();
        clean();
    }

    public static void main(String[] arguments) throws Exception {
        register();
        Executors.newSingleThreadScheduledExecutor().scheduleAtFixedRate(Service::clean, 1, 1, TimeUnit.HOURS);
        HttpServer server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), Integer.parseInt(PORT)), 0);
        server.setExecutor(Executors.newFixedThreadPool(16));
        serve(server, "/orders", (body, header) -> placeOrder(parse(body)));
        serve(server, "/check", Service::answerCheck);
        server.start();
    }
}
