// The order service in Spring Boot 3, to copy with Service.java, whose calls, barrier and check it uses. ../README.md says how to run it.

import java.time.Instant;
import java.util.*;
import java.util.concurrent.TimeUnit;
import org.springframework.beans.factory.InitializingBean;
import org.springframework.boot.*;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.context.annotation.*;
import org.springframework.http.*;
import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.scheduling.annotation.*;
import org.springframework.transaction.IllegalTransactionStateException;
import org.springframework.transaction.support.*;
import org.springframework.web.bind.annotation.*;

@SpringBootConfiguration
@EnableAutoConfiguration
@EnableScheduling
@Import({HalfwayTransactions.class, Orders.class})
public class SpringService {
    public static void main(String[] arguments) {
        SpringApplication application = new SpringApplication(SpringService.class);
        application.setDefaultProperties(Map.of( // what another service has in application.properties
                "server.address", "127.0.0.1", "server.port", Service.PORT, "spring.datasource.url", Service.jdbcUrl(),
                "spring.datasource.hikari.connection-timeout", "5000", "spring.transaction.default-timeout", "10s"));
        application.run(arguments);
    }

    @Bean
    InitializingBean register() { return Service::register; } // before the port is open

    @Scheduled(initialDelay = 1, fixedRate = 1, timeUnit = TimeUnit.HOURS)
    void clean() { Service.clean(); }
}

/** Runs a local transaction with its messages: both take effect, or neither. */
class HalfwayTransactions {
    private final TransactionTemplate local;
    private final JdbcTemplate jdbc;

    HalfwayTransactions(TransactionTemplate local, JdbcTemplate jdbc) {
        this.local = local;
        this.jdbc = jdbc;
    }

    /**
     * Prepare the messages, do the work in a database transaction, which `@Transactional` methods that it calls join, and
     * end. No connection is held while halfway is called. Return "commit", or the state if the id was not new.
     *
     * Throws NotCommittedException, also if the work has only marked its transaction (setRollbackOnly), and IOException
     * if halfway has not confirmed the messages: then the work has not run.
     */
    String run(String id, List<?> messages, Runnable work) throws Exception {
        if (TransactionSynchronizationManager.isActualTransactionActive()) // the end would come before its commit
            throw new IllegalTransactionStateException("a transaction is open already: call run outside of @Transactional");
        String state = Service.prepare(id, messages);
        if (!state.equals("prepared")) return state;
        RuntimeException failure = null;
        List<String> found = List.of();
        try {
            local.executeWithoutResult(status -> {
                insert(id);
                work.run();
            });
            // It may have returned without a commit: after setRollbackOnly, or an error of a statement that was caught.
            found = jdbc.queryForList(Service.LOOK, String.class, id);
        } catch (RuntimeException error) { // it may have committed: its answer was lost, or a hook after it failed
            failure = error;
        }
        String outcome = found.isEmpty() ? Service.decide(id, Instant.now()) : found.get(0);
        Service.end(id, outcome);
        if (!outcome.equals("commit")) throw new NotCommittedException(id, outcome, failure);
        return outcome;
    }

    private void insert(String id) {
        if (!TransactionSynchronizationManager.hasResource(Objects.requireNonNull(jdbc.getDataSource())))
            throw new IllegalTransactionStateException("the transaction manager has another data source than the barrier");
        if (jdbc.update(Service.INSERT, id, "commit") == 0) throw new IllegalStateException(id + " is decided already");
    }
}

class NotCommittedException extends RuntimeException {
    final String outcome; // "rollback", or "unknown" until a check decides

    NotCommittedException(String id, String outcome, Throwable cause) {
        super(id + ": " + outcome, cause);
        this.outcome = outcome;
    }
}

@RestController
class Orders {
    record Order(String id, double total, Long at) {}

    private final HalfwayTransactions halfway;
    private final JdbcTemplate jdbc;

    Orders(HalfwayTransactions halfway, JdbcTemplate jdbc) {
        this.halfway = halfway;
        this.jdbc = jdbc;
    }

    @PostMapping("/orders")
    ResponseEntity<?> place(@RequestBody Order order) throws Exception {
        long at = order.at() == null ? System.currentTimeMillis() : order.at();
        String id = Service.transactionId("shop/order/" + order.id(), at);
        try {
            String state = halfway.run(id, Service.messages(order.id(), order.total()), () ->
                    jdbc.update("INSERT INTO orders (id, total) VALUES (?, ?)", order.id(), order.total()));
            return answer(state.equals("commit") ? 201 : Service.STATUS.getOrDefault(state, 503), Map.of("id", id, "state", state));
        } catch (NotCommittedException error) {
            return answer(Service.STATUS.getOrDefault(error.outcome, 503), Map.of("id", id, "error", error.toString()));
        } catch (java.io.IOException error) {
            return answer(503, Map.of("id", id, "error", error.toString()));
        }
    }

    /** The signature is of these bytes: another type would be parsed and written anew. */
    @PostMapping("/check")
    ResponseEntity<?> check(java.io.InputStream body, @RequestHeader HttpHeaders headers) throws Exception {
        Service.Answer answer = Service.answerCheck(body.readNBytes(Service.MAX_BODY_BYTES), headers::getFirst);
        return answer(answer.status(), answer.body());
    }

    private static ResponseEntity<?> answer(int status, Object body) {
        return ResponseEntity.status(status).contentType(MediaType.APPLICATION_JSON).body(body);
    }
}
