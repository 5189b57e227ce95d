// A producer in Java 17, without a library: java Producer.java HALFWAY_URL TOPIC DATABASE
//
// Each line of standard input is an order to place: its number, and perhaps the time when it came in, in milliseconds since
// 1970. The same line again is the same transaction. Only committed orders reach TOPIC. To see a check, place an order whose
// number starts with "lost": its end is not sent, as if the process had died there. An order whose number starts with "bad"
// fails in its local transaction.

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.security.MessageDigest;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.Executors;
import java.util.regex.Pattern;

public class Producer {
    static final int ATTEMPTS = 7;
    static final Duration ATTEMPT = Duration.ofSeconds(3);
    static volatile HttpClient http = newClient();
    static String halfway;
    static Barrier barrier;

    /** Takes the place of the service's database: the outcome of each order. The first decision wins. */
    static class Barrier {
        private final Map<String, String> outcomes = new HashMap<>();
        private final Path file;

        Barrier(Path file) throws IOException {
            this.file = file;
            if (Files.exists(file)) {
                for (String line : Files.readAllLines(file)) {
                    outcomes.put(line.split(" ")[1], line.split(" ")[0]);
                }
            }
        }

        /** In a database: one transaction that inserts the order and a row with its outcome, unless the row exists. */
        synchronized String decide(String id, String outcome) throws IOException {
            if (!outcomes.containsKey(id)) {
                Files.writeString(file, outcome + " " + id + "\n", StandardOpenOption.CREATE, StandardOpenOption.APPEND,
                        StandardOpenOption.SYNC);
                outcomes.put(id, outcome);
            }
            return outcomes.get(id);
        }
    }

    public static void main(String[] arguments) throws Exception {
        halfway = arguments[0] + "/v1";
        String topic = arguments[1];
        barrier = new Barrier(Path.of(arguments[2]));

        HttpServer checks = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);
        checks.setExecutor(Executors.newFixedThreadPool(4));
        checks.createContext("/check", Producer::answerCheck);
        checks.start();
        String checkUrl = "http://127.0.0.1:" + checks.getAddress().getPort() + "/check";
        // Adds to the group: it takes nothing away from a newer release, or from what an operator has set.
        call("PATCH", "/groups/java-shop", """
                {"check": {"urls": ["%s"]}, "topics": ["%s"],
                 "policy": {"first_check_after_s": 1, "check_interval_s": 1}}""".formatted(checkUrl, topic));
        System.out.println("ready " + checkUrl);

        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            String[] order = line.split(" ");
            long at = order.length > 1 ? Long.parseLong(order[1]) : System.currentTimeMillis();
            System.out.println(order[0] + " " + place(topic, order[0], at));
        }
        checks.stop(0);
        System.exit(0);
    }

    /** The id of a transaction, a UUIDv7 that is derived from a key and a time in milliseconds since 1970 (docs/api.md, Ids). */
    static String transactionId(String key, long at) throws Exception {
        byte[] hash = MessageDigest.getInstance("SHA-256").digest(key.getBytes(StandardCharsets.UTF_8));
        ByteBuffer bits = ByteBuffer.wrap(hash);
        long high = at << 16 | 0x7000 | bits.getShort() & 0x0fff;
        long low = bits.getLong() & 0x3fffffffffffffffL | 0x8000000000000000L;
        return new UUID(high, low).toString();
    }

    /** Prepare, run the local transaction, end. */
    static String place(String topic, String order, long at) throws Exception {
        String id = transactionId("shop/order/" + order, at);
        // 1. The messages are stored, invisible to consumers. The same id is the same transaction, so the request is
        //    repeated if its answer is lost. Do nothing without a 200 or 201 with the state `prepared`.
        String prepared = call("POST", "/transactions", """
                {"group": "java-shop", "id": "%s", "messages": [
                  {"topic": "%s", "key": "%s", "value": {"type": "JSON", "data": {"order": "%s"}}}]}"""
                .formatted(id, topic, order, order));
        if (!"prepared".equals(field(prepared, "state"))) {
            return "refused";
        }
        // 2. The local transaction. If a check came first and answered rollback, it must fail.
        String outcome = barrier.decide(id, order.startsWith("bad") ? "rollback" : "commit");
        // 3. The end. If it is lost, halfway sends a check.
        if (order.startsWith("lost")) {
            return "open";
        }
        return field(call("POST", "/transactions/" + id + "/end", "{\"outcome\": \"" + outcome + "\"}"), "state");
    }

    /** Answer a check. If there is no outcome yet, a rollback is stored first, so that the order can never commit. */
    static void answerCheck(HttpExchange exchange) throws IOException {
        try (exchange) {
            String check = new String(exchange.getRequestBody().readAllBytes());
            String outcome = barrier.decide(field(check, "id"), "rollback");
            // The nonce binds this answer to this check.
            byte[] answer = "{\"outcome\": \"%s\", \"nonce\": \"%s\"}".formatted(outcome, field(check, "nonce")).getBytes();
            exchange.getResponseHeaders().set("Content-Type", "application/json");
            exchange.sendResponseHeaders(200, answer.length);
            exchange.getResponseBody().write(answer);
        }
    }

    static HttpClient newClient() {
        return HttpClient.newBuilder().connectTimeout(ATTEMPT).version(HttpClient.Version.HTTP_1_1).build();
    }

    /**
     * Call halfway until the answer is final. Every call of this example may be repeated. A kept connection may have died
     * silently, so an attempt is short, and the next one uses new connections.
     */
    static String call(String method, String path, String body) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(halfway + path)).timeout(ATTEMPT)
                .header("Content-Type", "application/json").method(method, HttpRequest.BodyPublishers.ofString(body)).build();
        String failure = "";
        for (int attempt = 1; attempt <= ATTEMPTS; attempt++) {
            try {
                HttpResponse<String> answer = http.send(request, HttpResponse.BodyHandlers.ofString());
                if (answer.statusCode() < 300) {
                    return answer.body();
                }
                failure = answer.statusCode() + " " + answer.body();
                if (answer.statusCode() < 500 && answer.statusCode() != 429) {
                    break;
                }
            } catch (IOException error) {
                failure = error.toString();
                http = newClient();
            }
            Thread.sleep(200L << attempt);
        }
        throw new IOException(method + " " + path + ": " + failure);
    }

    /** Return a text field. Quotes inside strings are escaped, so only a real field can match. */
    static String field(String json, String name) {
        var matcher = Pattern.compile("\"" + name + "\"\\s*:\\s*\"([^\"\\\\]*)\"").matcher(json);
        return matcher.find() ? matcher.group(1) : "";
    }
}
