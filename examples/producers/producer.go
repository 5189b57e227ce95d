// A producer in Go, without a library: go run producer.go HALFWAY_URL TOPIC DATABASE
//
// Each line of standard input is an order to place. What is committed reaches TOPIC, and nothing else does. To see halfway
// ask, place an order whose id begins with "lost": its end is not sent, as if the process had died there. One whose id
// begins with "bad" fails in its local transaction.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

type object = map[string]any

// Barrier stands for the service's database: which orders committed, and which never will. The first decision wins.
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

// Decide is, in a database, one transaction that inserts the order and a row with its outcome, unless that row stands.
func (b *Barrier) Decide(id, outcome string) (string, error) {
	b.lock.Lock()
	defer b.lock.Unlock()
	if stands, found := b.outcomes[id]; found {
		return stands, nil
	}
	if _, err := fmt.Fprintln(b.file, outcome, id); err != nil || b.file.Sync() != nil {
		return "unknown", fmt.Errorf("the database was not written: %v", err)
	}
	b.outcomes[id] = outcome
	return outcome, nil
}

// answerCheck says what became of a transaction. One that is not there is rolled back for good before that is said.
func (b *Barrier) answerCheck(writer http.ResponseWriter, request *http.Request) {
	var question struct{ ID, Nonce string }
	if err := json.NewDecoder(request.Body).Decode(&question); err != nil || question.ID == "" {
		http.Error(writer, "this is no check", http.StatusBadRequest)
		return
	}
	outcome, err := b.Decide(question.ID, "rollback")
	if err != nil {
		log.Print(err)
	}
	writer.Header().Set("Content-Type", "application/json")
	// The nonce binds this answer to this question.
	json.NewEncoder(writer).Encode(object{"outcome": outcome, "nonce": question.Nonce})
}

// call asks halfway until it answers for good; every call here may be repeated.
func call(method, url string, body object) (object, error) {
	client := http.Client{Timeout: 10 * time.Second}
	text, _ := json.Marshal(body)
	failure := ""
	for attempt := 1; attempt <= 5; attempt++ {
		request, err := http.NewRequest(method, url, bytes.NewReader(text))
		if err != nil {
			return nil, err
		}
		request.Header.Set("Content-Type", "application/json")
		if answer, err := client.Do(request); err != nil {
			failure = err.Error()
		} else {
			got, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			var shown object
			if answer.StatusCode < 300 && json.Unmarshal(got, &shown) == nil {
				return shown, nil
			}
			failure = fmt.Sprint(answer.StatusCode, " ", string(got))
			if answer.StatusCode < 500 && answer.StatusCode != http.StatusTooManyRequests {
				break
			}
		}
		time.Sleep(200 * time.Millisecond << attempt)
	}
	return nil, fmt.Errorf("%s %s: %s", method, url, failure)
}

// place prepares, runs the local transaction and ends.
func place(api, topic, id string, barrier *Barrier) any {
	// 1. The messages are stored out of sight. The same id again is the same transaction, so a lost answer is asked for
	//    again. Without a 200 or 201 that says `prepared` nothing may be done.
	message := object{"topic": topic, "key": id, "value": object{"type": "JSON", "data": object{"order": id}}}
	prepared, err := call("POST", api+"/transactions", object{"group": "go-shop", "id": id, "messages": []object{message}})
	if err != nil || prepared["state"] != "prepared" {
		return "refused"
	}
	// 2. The local transaction. If a check came first and said rollback, it must fail.
	wanted := "commit"
	if strings.HasPrefix(id, "bad") {
		wanted = "rollback"
	}
	outcome, err := barrier.Decide(id, wanted)
	// 3. The end. If it is lost, or the outcome is not known, halfway asks.
	if strings.HasPrefix(id, "lost") || err != nil {
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
	registered := object{"check": object{"urls": []string{checkURL}}, "topics": []string{topic}, "policy": policy}
	if _, err := call("PUT", api+"/groups/go-shop", registered); err != nil {
		log.Fatal(err)
	}
	fmt.Println("ready", checkURL)
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		fmt.Println(orders.Text(), place(api, topic, orders.Text(), barrier))
	}
}
