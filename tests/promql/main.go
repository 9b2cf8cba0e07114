// Command promql evaluates queries over scraped pages: JSON on stdin, JSON on stdout.
//
// In: {"pages": [{"at": SECONDS, "labels": {...}, "text": PAGE}], "queries": [...], "at": SECONDS}.
// Out, for each query: {"error": TEXT} or {"samples": [{"labels": {...}, "value": NUMBER}]}.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/tsdb"
)

type page struct {
	At     float64           `json:"at"`
	Labels map[string]string `json:"labels"`
	Text   string            `json:"text"`
}

type job struct {
	Pages   []page   `json:"pages"`
	Queries []string `json:"queries"`
	At      float64  `json:"at"`
}

type sample struct {
	Labels map[string]string `json:"labels"`
	Value  string            `json:"value"`
}

type answer struct {
	Error   string   `json:"error,omitempty"`
	Samples []sample `json:"samples"`
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	var asked job
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "promql")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	db, err := tsdb.Open(folder, nil, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		return err
	}
	defer db.Close()
	for _, p := range asked.Pages {
		if err := store(db, p); err != nil {
			return err
		}
	}
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1_000_000, Timeout: 10 * time.Second, LookbackDelta: 5 * time.Minute,
	})
	answers := make([]answer, len(asked.Queries))
	for i, query := range asked.Queries {
		answers[i] = evaluate(engine, db, query, toTime(asked.At))
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}

// store appends a page's samples, as a scrape would.
func store(db *tsdb.DB, p page) error {
	parser := textparse.NewPromParser([]byte(p.Text), labels.NewSymbolTable(), false)
	appender := db.Appender(context.Background())
	for {
		entry, err := parser.Next()
		if errors.Is(err, io.EOF) {
			return appender.Commit()
		}
		if err != nil {
			return err
		}
		if entry != textparse.EntrySeries {
			continue
		}
		_, _, value := parser.Series()
		var found labels.Labels
		parser.Labels(&found)
		builder := labels.NewBuilder(found)
		for name, text := range p.Labels {
			builder.Set(name, text)
		}
		if _, err := appender.Append(0, builder.Labels(), toTime(p.At).UnixMilli(), value); err != nil {
			return err
		}
	}
}

func evaluate(engine *promql.Engine, db *tsdb.DB, query string, at time.Time) answer {
	ctx := context.Background()
	prepared, err := engine.NewInstantQuery(ctx, db, nil, query, at)
	if err != nil {
		return answer{Error: err.Error()}
	}
	defer prepared.Close()
	result := prepared.Exec(ctx)
	if result.Err != nil {
		return answer{Error: result.Err.Error()}
	}
	vector, err := result.Vector()
	if err != nil {
		return answer{Error: err.Error()}
	}
	told := answer{Samples: []sample{}}
	for _, one := range vector {
		value := strconv.FormatFloat(one.F, 'g', -1, 64)
		told.Samples = append(told.Samples, sample{one.Metric.Map(), value})
	}
	return told
}

func toTime(seconds float64) time.Time {
	return time.UnixMilli(int64(seconds * 1000))
}
