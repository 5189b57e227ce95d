// A producer in Go, without a library: go run producer.go HALFWAY_URL TOPIC DATABASE
//
// Each line of standard input is an order to place: its number, and perhaps the time when it came in, in milliseconds since
// 1970. The same line again is the same transaction. Only committed orders reach TOPIC. To see a check, place an order whose
// number starts with "lost": its end is not sent, as if the process had died there. An order whose number starts with "bad"
// fails in its local transaction.
package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

type object = map[string]any

// Barrier takes the place of the service's database: the outcome of each order. The first decision wins.
type Barrier struct {
	lock     sync.Mutex
	outcomes map[string]string
	file     *os.File
}

func openBarrier(path string) *Barrier {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		log.Fatal(err)
	}
	barrier := &Barrier{outcomes: map[string]string{}, file: file}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		outcome, id, _ := strings.Cut(lines.Text(), " ")
		barrier.outcomes[id] = outcome
	}
	return barrier
}

// Decide is, in a database, one transaction that inserts the order and a row with its outcome, unless the row exists.
func (b *Barrier) Decide(id, outcome string) (string, error) {
	b.lock.Lock()
	defer b.lock.Unlock()
	if existing, ok := b.outcomes[id]; ok {
		return existing, nil
	}
	if _, err := fmt.Fprintln(b.file, outcome, id); err != nil || b.file.Sync() != nil {
		return "unknown", fmt.Errorf("the database was not written: %v", err)
	}
	b.outcomes[id] = outcome
	return outcome, nil
}

// answerCheck answers a check. If there is no outcome yet, a rollback is stored first, so that the order can never commit.
func (b *Barrier) answerCheck(writer http.ResponseWriter, request *http.Request) {
	var check struct{ ID, Nonce string }
	if err := json.NewDecoder(request.Body).Decode(&check); err != nil || check.ID == "" {
		http.Error(writer, "this is not a check", http.StatusBadRequest)
		return
	}
	outcome, err := b.Decide(check.ID, "rollback")
	if err != nil {
		log.Print(err)
	}
	writer.Header().Set("Content-Type", "application/json")
	// The nonce binds this answer to this check.
	json.NewEncoder(writer).Encode(object{"outcome": outcome, "nonce": check.Nonce})
}

// call calls halfway until the answer is final. Every call of this example may be repeated. A kept connection may have
// died silently, so an attempt is short, and the next one uses a new connection.
func call(method, url string, body object) (object, error) {
	client := http.Client{Timeout: 3 * time.Second}
	text, _ := json.Marshal(body)
	failure := ""
	for attempt := 1; attempt <= 7; attempt++ {
		request, err := http.NewRequest(method, url, bytes.NewReader(text))
		if err != nil {
			return nil, err
		}
		request.Header.Set("Content-Type", "application/json")
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
			if answer.StatusCode < 500 && answer.StatusCode != http.StatusTooManyRequests {
				break
			}
		}
		time.Sleep(200 * time.Millisecond << attempt)
	}
	return nil, fmt.Errorf("%s %s: %s", method, url, failure)
}

// transactionID derives the id of a transaction, a UUIDv7, from a key and a time in milliseconds since 1970 (docs/api.md, Ids).
func transactionID(key string, at int64) string {
	hash := sha256.Sum256([]byte(key))
	id := append(binary.BigEndian.AppendUint64(nil, uint64(at)<<16)[:6], hash[:10]...)
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// place prepares, runs the local transaction and ends.
func place(api, topic, order string, at int64, barrier *Barrier) any {
	id := transactionID("shop/order/"+order, at)
	// 1. The messages are stored, invisible to consumers. The same id is the same transaction, so the request is repeated
	//    if its answer is lost. Do nothing without a 200 or 201 with the state `prepared`.
	message := object{"topic": topic, "key": order, "value": object{"type": "JSON", "data": object{"order": order}}}
	prepared, err := call("POST", api+"/transactions", object{"group": "go-shop", "id": id, "messages": []object{message}})
	if err != nil || prepared["state"] != "prepared" {
		return "refused"
	}
	// 2. The local transaction. If a check came first and answered rollback, it must fail.
	decision := "commit"
	if strings.HasPrefix(order, "bad") {
		decision = "rollback"
	}
	outcome, err := barrier.Decide(id, decision)
	// 3. The end. If it is lost, or if the outcome is not known, halfway sends a check.
	if strings.HasPrefix(order, "lost") || err != nil {
		return "open"
	}
	ended, err := call("POST", api+"/transactions/"+id+"/end", object{"outcome": outcome})
	if err != nil {
		return err
	}
	return ended["state"]
}

func main() {
	api, topic, barrier := os.Args[1]+"/v1", os.Args[2], openBarrier(os.Args[3])
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("POST /check", barrier.answerCheck)
	go http.Serve(listener, nil)
	checkURL := fmt.Sprintf("http://%s/check", listener.Addr())
	policy := object{"first_check_after_s": 1, "check_interval_s": 1}
	group := object{"check": object{"urls": []string{checkURL}}, "topics": []string{topic}, "policy": policy}
	// Adds to the group: it takes nothing away from a newer release, or from what an operator has set.
	if _, err := call("PATCH", api+"/groups/go-shop", group); err != nil {
		log.Fatal(err)
	}
	fmt.Println("ready", checkURL)
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		order, cameIn, _ := strings.Cut(orders.Text(), " ")
		at, err := strconv.ParseInt(cameIn, 10, 64)
		if err != nil {
			at = time.Now().UnixMilli()
		}
		fmt.Println(order, place(api, topic, order, at, barrier))
	}
}
