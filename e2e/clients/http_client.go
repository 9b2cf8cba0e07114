// Go's net/http: go run http_client.go URL MODEL prints what test_http_clients.py compares, as JSON.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
)

type answer struct {
	Choices []struct{ Text string }
	Error   struct{ Code string }
}

type result struct {
	Whole    string `json:"whole"`
	Streamed string `json:"streamed"`
	Pieces   int    `json:"pieces"`
	Status   int    `json:"status"`
	Code     string `json:"code"`
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func send(model string, stream bool) *http.Response {
	body, err := json.Marshal(map[string]any{
		"model": model, "prompt": "Once upon a time", "max_tokens": 24, "stream": stream,
	})
	check(err)
	response, err := http.Post(os.Args[1]+"/v1/completions", "application/json", bytes.NewReader(body))
	check(err)
	return response
}

// Read to the end, so that the connection is used again.
func read(response *http.Response) (found answer) {
	data, err := io.ReadAll(response.Body)
	check(err)
	response.Body.Close()
	check(json.Unmarshal(data, &found))
	return found
}

func main() {
	model := os.Args[2]
	found := result{Whole: read(send(model, false)).Choices[0].Text}
	stream := send(model, true)
	lines := bufio.NewScanner(stream.Body)
	for lines.Scan() {
		event, isData := strings.CutPrefix(lines.Text(), "data: {")
		if !isData {
			continue
		}
		var part answer
		check(json.Unmarshal([]byte("{"+event), &part))
		found.Pieces++
		found.Streamed += part.Choices[0].Text
	}
	check(lines.Err())
	stream.Body.Close()
	refused := send("gpt-9", false)
	found.Status, found.Code = refused.StatusCode, read(refused).Error.Code
	check(json.NewEncoder(os.Stdout).Encode(found))
}
