import java.sql.*;
import java.util.*;
import org.springframework.boot.*;
import org.springframework.context.ConfigurableApplicationContext;
import org.springframework.context.annotation.Import;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.jdbc.datasource.*;
import org.springframework.transaction.annotation.*;
import org.springframework.transaction.interceptor.TransactionAspectSupport;
import org.springframework.transaction.support.*;

/** Ways to end a transaction in Spring, each as an order of its name; prints what the caller gets. */
@SpringBootConfiguration
@EnableAutoConfiguration
@Import({HalfwayTransactions.class, SpringTraps.Rows.class})
public class SpringTraps {
    static class Rows {
        final JdbcTemplate jdbc;

        Rows(JdbcTemplate jdbc) { this.jdbc = jdbc; }

        void insert(String name) { jdbc.update("INSERT INTO orders (id, total) VALUES (?, 1)", name); }

        void hook(boolean before) {
            TransactionSynchronizationManager.registerSynchronization(new TransactionSynchronization() {
                @Override public void beforeCommit(boolean readOnly) { if (before) throw new IllegalStateException("a hook"); }
                @Override public void afterCommit() { if (!before) throw new IllegalStateException("a hook"); }
            });
        }

        @Transactional public void joins(String name) { insert(name); }

        @Transactional public void marks(String name) {
            insert(name);
            TransactionAspectSupport.currentTransactionStatus().setRollbackOnly();
        }

        @Transactional public void failsWithin(String name) { throw new IllegalStateException(name); }

        @Transactional(propagation = Propagation.NESTED) public void failsInSavepoint(String name) {
            insert(name + ", in a savepoint");
            throw new IllegalStateException(name);
        }

        @Transactional(propagation = Propagation.REQUIRES_NEW) public void readsElsewhere() { jdbc.queryForList("SELECT 1"); }
    }

    static HalfwayTransactions halfway;

    static void trap(String name, Runnable work) { told(name, () -> run(halfway, name, work)); }

    static String run(HalfwayTransactions transactions, String name, Runnable work) {
        try {
            return transactions.run(Service.transactionId(name, System.currentTimeMillis()), Service.messages(name, 1), work);
        } catch (RuntimeException error) {
            throw error;
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    static void told(String name, java.util.function.Supplier<String> attempt) {
        String told;
        try {
            told = attempt.get();
        } catch (NotCommittedException error) {
            told = error.outcome;
        } catch (RuntimeException error) {
            told = error.getClass().getSimpleName();
        }
        System.out.println("TRAP " + Service.GSON.toJson(Map.of(name, told)));
    }

    static void caught(Runnable work) {
        try {
            work.run();
        } catch (RuntimeException error) { // as a service that goes on does
        }
    }

    /** The same order without Spring, after a failed statement that the service has caught. */
    static String plain(String name) {
        String id = UUID.randomUUID().toString();
        try (Connection connection = Service.connect()) {
            connection.setAutoCommit(false);
            Service.execute(connection, Service.INSERT, id, "commit");
            Service.execute(connection, "INSERT INTO orders (id, total) VALUES (?, 1)", name);
            try {
                Service.execute(connection, "INSERT INTO orders (id, total) VALUES (?, 1)", name);
            } catch (SQLException error) { // as a service that goes on does
            }
            Service.commit(connection, id);
            return "commit";
        } catch (SQLException error) {
            return Service.decide(id, java.time.Instant.now());
        }
    }

    public static void main(String[] arguments) throws Exception {
        SpringApplication application = new SpringApplication(SpringTraps.class);
        application.setWebApplicationType(WebApplicationType.NONE);
        application.setDefaultProperties(Map.of("spring.datasource.url", Service.jdbcUrl()));
        Service.register();
        try (ConfigurableApplicationContext context = application.run()) {
            halfway = context.getBean(HalfwayTransactions.class);
            Rows rows = context.getBean(Rows.class);
            TransactionTemplate outer = context.getBean(TransactionTemplate.class);
            trap("joins", () -> rows.joins("joins"));
            trap("savepoint", () -> { rows.insert("savepoint"); caught(() -> rows.failsInSavepoint("savepoint")); });
            trap("other connection", () -> { rows.insert("other connection"); rows.readsElsewhere(); });
            trap("exception", () -> rows.failsWithin("exception"));
            trap("rollback-only", () -> rows.marks("rollback-only"));
            trap("participant", () -> { rows.insert("participant"); caught(() -> rows.failsWithin("participant")); });
            trap("caught error", () -> { rows.insert("caught error"); caught(() -> rows.insert("caught error")); });
            trap("before the commit", () -> { rows.insert("before the commit"); rows.hook(true); });
            trap("after the commit", () -> { rows.insert("after the commit"); rows.hook(false); });
            told("outer", () -> outer.execute(status -> {
                String told = run(halfway, "outer", () -> rows.insert("outer"));
                status.setRollbackOnly();
                return told;
            }));
            told("caught error without Spring", () -> plain("caught error without Spring"));
            var elsewhere = new JdbcTemplate(new DriverManagerDataSource(Service.jdbcUrl()));
            told("other data source", () ->
                    run(new HalfwayTransactions(outer, elsewhere), "other data source", () -> rows.insert("other data source")));
        }
    }
}
