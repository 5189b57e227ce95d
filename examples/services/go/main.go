// An order service in Go, to copy: the transaction, the barrier and the check endpoint. ../README.md says how to run it.
package main

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	_ "github.com/lib/pq"
)

const (
	attempts  = 7
	retention = 7 * 24 * time.Hour // at least twice the group's max_age_s
	tolerance = 5 * time.Minute
	maxBody   = 32 << 20
)

var (
	halfway = env("HALFWAY_URL", "http://127.0.0.1:8080")
	key     = env("HALFWAY_KEY", "")
	group   = env("GROUP", "shop")
	topic   = env("TOPIC", "orders")
	port    = env("PORT", "9000")
	client  = http.Client{Timeout: 3 * time.Second}
	orders  *sql.DB
	// checks is a pool of its own: orders cannot use it up, and none of its connections waits long for an open order.
	checks   *sql.DB
	secrets  [][]byte
	statuses = map[any]int{"commit": 200, "committed": 200, "rollback": 409, "rolled_back": 409} // 503 if it is open or parked
)

type object = map[string]any
type order struct {
	ID    string
	Total float64
	At    int64 // when it came in, in milliseconds since 1970
}

func env(name, otherwise string) string { return cmp.Or(os.Getenv(name), otherwise) }

// --- The transaction

// call calls halfway until the answer is final. Every call here may be repeated: a repeat of one that took effect changes
// nothing. A kept connection may have died silently, so an attempt is short, and the next one uses a new connection.
func call(method, path string, body object) (object, error) {
	text, _ := json.Marshal(body)
	failure := ""
	for attempt := 1; attempt <= attempts; attempt++ {
		request, err := http.NewRequest(method, halfway+"/v1"+path, bytes.NewReader(text))
		must(err)
		request.Header.Set("Content-Type", "application/json")
		if key != "" {
			request.Header.Set("Authorization", "Bearer "+key)
		}
		if answer, err := client.Do(request); err != nil {
			failure = err.Error()
			client.CloseIdleConnections()
		} else {
			content, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			var document object
			if answer.StatusCode < 300 && json.Unmarshal(content, &document) == nil {
				return document, nil
			}
			failure = fmt.Sprint(answer.StatusCode, " ", string(content))
			if answer.StatusCode >= 300 && answer.StatusCode < 500 && answer.StatusCode != http.StatusTooManyRequests {
				break
			}
		}
		time.Sleep(100 * time.Millisecond << attempt)
	}
	return nil, fmt.Errorf("%s %s: %s", method, path, failure)
}

// transactionID derives an id from a key and a time in milliseconds since 1970 (docs/api.md, Ids): a repeat has the same.
func transactionID(key string, at int64) string {
	hash := sha256.Sum256([]byte(key))
	id := append(binary.BigEndian.AppendUint64(nil, uint64(at)<<16)[:6], hash[:10]...)
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

func placeOrder(body []byte, _ http.Header) (int, object) {
	placed := order{At: time.Now().UnixMilli()}
	if err := json.Unmarshal(body, &placed); err != nil {
		return http.StatusBadRequest, object{"error": err.Error()}
	}
	id := transactionID("shop/order/"+placed.ID, placed.At)
	value := object{"type": "JSON", "data": object{"order": placed.ID, "total": placed.Total}}
	messages := []object{{"topic": topic, "key": placed.ID, "value": value}}
	// 1. The messages are stored, invisible to consumers. Without a confirmed `prepared` the local transaction must not run.
	prepared, err := call("POST", "/transactions", object{"group": group, "id": id, "messages": messages})
	if err != nil {
		return http.StatusServiceUnavailable, object{"id": id, "error": err.Error()} // if it is stored, a check rolls it back
	}
	if state := prepared["state"]; state != "prepared" {
		return cmp.Or(statuses[state], 503), object{"id": id, "state": state}
	}
	// 2. The local transaction. If anything fails in it, even the answer of the commit, the barrier says what became of it.
	outcome, status := "commit", http.StatusCreated
	if err := placeInDatabase(id, placed); err != nil {
		log.Printf("order %s: %v", placed.ID, err)
		outcome = decide(id, time.Now())
		status = cmp.Or(statuses[outcome], 503)
	}
	// 3. The end. If it is lost, halfway sends a check.
	if outcome != "unknown" {
		if _, err := call("POST", "/transactions/"+id+"/end", object{"outcome": outcome}); err != nil {
			log.Printf("left to check-back: %v", err)
		}
	}
	return status, object{"id": id, "outcome": outcome}
}

func placeInDatabase(id string, placed order) error {
	tx, err := orders.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback() // what has not committed
	// The first statement: from here on a check waits for this transaction. No row was written if a check came before.
	result, err := tx.Exec(insert, id, "commit")
	if err != nil {
		return err
	} else if written, _ := result.RowsAffected(); written == 0 {
		return fmt.Errorf("%s is decided already", id)
	}
	if _, err := tx.Exec("INSERT INTO orders (id, total) VALUES ($1, $2)", placed.ID, placed.Total); err != nil {
		return err
	}
	return tx.Commit()
}

// --- The barrier: the statements of adapters/halfway/client/barrier/sql/postgresql.sql, which gives the reason of each clause

const (
	create = `CREATE TABLE IF NOT EXISTS halfway_barrier (
		transaction_id varchar(128) COLLATE "C" PRIMARY KEY,
		outcome varchar(8) NOT NULL,
		decided_at timestamptz NOT NULL DEFAULT clock_timestamp());
		CREATE INDEX IF NOT EXISTS halfway_barrier_decided_at ON halfway_barrier (decided_at);`
	insert    = `INSERT INTO halfway_barrier (transaction_id, outcome) VALUES ($1, $2) ON CONFLICT (transaction_id) DO NOTHING`
	takePlace = `WITH bound AS MATERIALIZED (SELECT set_config('lock_timeout', '500', true))
		INSERT INTO halfway_barrier (transaction_id, outcome) SELECT $1, $2 FROM bound ON CONFLICT (transaction_id) DO NOTHING`
	lookUp    = `SELECT outcome FROM halfway_barrier WHERE transaction_id = $1`
	deleteOld = `WITH elected AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(hashtext('halfway_barrier')) AS mine)
		DELETE FROM halfway_barrier WHERE (SELECT mine FROM elected) AND (transaction_id) IN (
			SELECT transaction_id FROM halfway_barrier WHERE decided_at < now() - $1 * interval '1 second'
			ORDER BY decided_at LIMIT $2)`
)

func look(id string) (outcome string, err error) {
	err = checks.QueryRow(lookUp, id).Scan(&outcome)
	return outcome, err
}

// decide returns the outcome of a transaction. If there is none yet, a rollback is stored, so that the order can never commit.
func decide(id string, preparedAt time.Time) string {
	outcome, err := look(id)
	if errors.Is(err, sql.ErrNoRows) {
		if time.Since(preparedAt) > retention/2 {
			return "unknown" // its row may have been deleted
		}
		if _, err = checks.Exec(takePlace, id, "rollback"); err == nil {
			outcome, err = look(id) // only a committed row is an answer
		}
	}
	if err != nil {
		log.Printf("%s cannot be decided now: %v", id, err) // usually because the local transaction is still open
		return "unknown"
	}
	return outcome
}

func clean() {
	for deleted := int64(100); deleted == 100; time.Sleep(100 * time.Millisecond) {
		result, err := checks.Exec(deleteOld, retention.Seconds(), 100)
		if err != nil {
			log.Printf("old rows of the barrier were not deleted: %v", err)
			return
		}
		deleted, _ = result.RowsAffected()
	}
}

// --- The check endpoint

// fetchSecrets fetches what checks are signed with. Without a key, halfway does not sign, and anybody can send checks.
func fetchSecrets() {
	if key == "" {
		return
	}
	answer, err := call("GET", "/groups/"+group+"/check-secrets", nil)
	must(err)
	for _, secret := range answer["secrets"].([]any) {
		decoded, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret.(string), "whsec_"))
		must(err)
		secrets = append(secrets, decoded)
	}
}

// isSigned returns whether halfway has signed this body within the last five minutes (Standard Webhooks).
func isSigned(body []byte, headers http.Header) bool {
	timestamp, err := strconv.ParseInt(headers.Get("webhook-timestamp"), 10, 64)
	if err != nil || math.Abs(time.Since(time.Unix(timestamp, 0)).Seconds()) > tolerance.Seconds() {
		return false
	}
	for _, secret := range secrets {
		mac := hmac.New(sha256.New, secret)
		fmt.Fprintf(mac, "%s.%d.%s", headers.Get("webhook-id"), timestamp, body)
		expected := mac.Sum(nil)
		for _, signature := range strings.Fields(headers.Get("webhook-signature")) { // several during a rotation
			text, isV1 := strings.CutPrefix(signature, "v1,")
			given, err := base64.StdEncoding.DecodeString(text)
			if isV1 && err == nil && hmac.Equal(given, expected) {
				return true
			}
		}
	}
	return false
}

func answerCheck(body []byte, headers http.Header) (int, object) {
	if key != "" && !isSigned(body, headers) {
		return http.StatusUnauthorized, object{"error": "halfway has not signed this check"}
	}
	var check struct {
		ID, Nonce  string
		PreparedAt time.Time `json:"prepared_at"`
	}
	if err := json.Unmarshal(body, &check); err != nil || check.ID == "" {
		return http.StatusBadRequest, object{"error": "this is not a check"}
	}
	// The nonce binds this answer to this check.
	return http.StatusOK, object{"outcome": decide(check.ID, check.PreparedAt), "nonce": check.Nonce}
}

// --- The server

func serve(answer func(body []byte, headers http.Header) (int, object)) http.HandlerFunc {
	return func(writer http.ResponseWriter, request *http.Request) {
		status, document := http.StatusBadRequest, object{"error": "the body cannot be read"}
		if body, err := io.ReadAll(http.MaxBytesReader(writer, request.Body, maxBody)); err == nil {
			status, document = answer(body, request.Header)
		}
		writer.Header().Set("Content-Type", "application/json")
		writer.WriteHeader(status)
		json.NewEncoder(writer).Encode(document)
	}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	database := env("DATABASE_URL", "postgresql://localhost/shop?sslmode=disable")
	var err error
	orders, err = sql.Open("postgres", database)
	must(err)
	checks, err = sql.Open("postgres", database)
	must(err)
	// A service with migrations has them there.
	_, err = orders.Exec(create + "CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, total double precision NOT NULL)")
	must(err)
	// PATCH takes nothing away from a newer release, or from what an operator has set.
	check := object{"urls": []string{env("CHECK_URL", "http://127.0.0.1:"+port+"/check")}}
	_, err = call("PATCH", "/groups/"+group, object{"check": check, "topics": []string{topic}})
	must(err)
	fetchSecrets()
	clean()
	go func() {
		for range time.Tick(time.Hour) {
			clean()
		}
	}()
	http.HandleFunc("POST /check", serve(answerCheck))
	http.HandleFunc("POST /orders", serve(placeOrder))
	must(http.ListenAndServe("127.0.0.1:"+port, nil))
}
