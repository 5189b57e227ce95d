// What a user writes with the generated client: it compiles only if optional fields are pointers and enums are strings.
package main

import (
	"context"
	"fmt"

	"halfway.example/client/client"
)

func main() {
	halfway, err := client.NewClientWithResponses("http://halfway:8080")
	if err != nil {
		panic(err)
	}
	remark := "by hand"
	ended, err := halfway.EndWithResponse(context.Background(), "id", nil, client.EndRequest{Outcome: client.Outcome("commit"), Remark: &remark})
	if err == nil && ended.JSON200 != nil {
		fmt.Println(string(ended.JSON200.State))
	}
	question := client.CheckQuestion{}
	fmt.Println(client.CheckAnswer{Outcome: client.Outcome("unknown"), Nonce: question.Nonce}, string(client.KeyKind("group")))
}
