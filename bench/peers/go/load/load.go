// Package load is what the load programs in Go have in common: arguments, pacing, the count of what was accepted and
// delivered, and the lines that bench/peers reads.
package load

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// MessagesMax is how many messages one run can number; beyond, it ends with an error.
const MessagesMax = 1 << 26

// HeadBytes of a payload hold its due time and its number.
const HeadBytes = 16

const (
	warmSeconds  = 3.0
	warmRate     = 2_000.0
	drainSeconds = 40
	arrivedMs    = 10
	errorsShown  = 3
)

// Arguments of every load program: CASE SECONDS RATE BYTES ADDRESS MODE WINDOW.
type Arguments struct {
	Case    string  // schedule or deliver
	Seconds float64 // how long messages are sent
	Rate    float64 // messages a second; 0: as fast as they are accepted
	Bytes   int     // of a payload
	Address string
	Mode    string
	Window  int // messages or batches under way
}

// Parse reads the command line.
func Parse() Arguments {
	if len(os.Args) != 8 {
		fmt.Fprintln(os.Stderr, "usage: CASE SECONDS RATE BYTES ADDRESS MODE WINDOW")
		os.Exit(2)
	}
	number := func(text string) float64 {
		value, err := strconv.ParseFloat(text, 64)
		Must(err)
		return value
	}
	return Arguments{
		Case:    os.Args[1],
		Seconds: number(os.Args[2]),
		Rate:    number(os.Args[3]),
		Bytes:   max(HeadBytes, int(number(os.Args[4]))),
		Address: os.Args[5],
		Mode:    os.Args[6],
		Window:  int(number(os.Args[7])),
	}
}

// Must ends the program if there is an error.
func Must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// NowMs is the wall clock.
func NowMs() int64 { return time.Now().UnixMilli() }

type bits [MessagesMax / 64]atomic.Uint64

// set returns whether the bit was clear before.
func (b *bits) set(place int64) bool {
	mask := uint64(1) << uint(place&63)
	return b[place>>6].Or(mask)&mask == 0
}

// Tally counts messages by their numbers. Safe for concurrent use.
type Tally struct {
	accepted, delivered bits
	numbered            atomic.Int64
	from                atomic.Int64 // first number of the measurement: those before are its warm-up
	acceptedCount       atomic.Int64
	deliveredCount      atomic.Int64
	failedCount         atomic.Int64
	repeatedCount       atomic.Int64

	lock    sync.Mutex
	began   int64
	late    map[int64]int64 // messages by lateness in ms
	arrived map[int64]int64 // messages by arrivedMs since began
}

// NewTally counts nothing yet.
func NewTally() *Tally {
	tally := &Tally{}
	tally.begin()
	return tally
}

func (t *Tally) begin() {
	t.lock.Lock()
	defer t.lock.Unlock()
	t.from.Store(t.numbered.Load())
	t.acceptedCount.Store(0)
	t.deliveredCount.Store(0)
	t.failedCount.Store(0)
	t.repeatedCount.Store(0)
	t.began = NowMs()
	t.late, t.arrived = map[int64]int64{}, map[int64]int64{}
}

// Next makes a payload, and returns it with the number and the due time that are in it.
func (t *Tally) Next(size int, due Span) (payload []byte, number, dueMs int64) {
	number = t.numbered.Add(1) - 1
	if number >= MessagesMax {
		Must(fmt.Errorf("more than %d messages", MessagesMax))
	}
	dueMs = NowMs() + due.FirstMs + rand.Int64N(due.WidthMs)
	payload = make([]byte, size)
	binary.BigEndian.PutUint64(payload, uint64(dueMs))
	binary.BigEndian.PutUint64(payload[8:], uint64(number))
	return payload, number, dueMs
}

// Accepted counts an acknowledged message.
func (t *Tally) Accepted(number int64) {
	t.accepted.set(number)
	t.acceptedCount.Add(1)
}

// Failed counts messages without an acknowledgement, and shows the first reasons.
func (t *Tally) Failed(count int64, reason any) {
	if t.failedCount.Add(count) <= errorsShown*count {
		fmt.Fprintln(os.Stderr, reason)
	}
}

// Delivered counts messages that arrived at nowMs.
func (t *Tally) Delivered(payloads [][]byte, nowMs int64) {
	t.lock.Lock()
	defer t.lock.Unlock()
	for _, payload := range payloads {
		due, number := int64(binary.BigEndian.Uint64(payload)), int64(binary.BigEndian.Uint64(payload[8:]))
		if !t.delivered.set(number) {
			t.repeatedCount.Add(1)
			continue
		}
		if number >= t.from.Load() {
			t.deliveredCount.Add(1)
			t.late[nowMs-due]++
			t.arrived[(nowMs-t.began)/arrivedMs]++
		}
	}
}

// missing is how many accepted messages have not been delivered.
func (t *Tally) missing() (count int64) {
	for place := range t.accepted {
		for word := t.accepted[place].Load() &^ t.delivered[place].Load(); word != 0; word &= word - 1 {
			count++
		}
	}
	return count
}

// drained waits until all accepted messages have been delivered, up to drainSeconds.
func (t *Tally) drained() {
	for end := time.Now().Add(drainSeconds * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if t.deliveredCount.Load() >= t.acceptedCount.Load() && t.missing() == 0 {
			return
		}
	}
}

// Span says when messages are due: evenly over WidthMs, from FirstMs ahead on.
type Span struct{ FirstMs, WidthMs int64 }

var (
	later = Span{3_600_000, 86_400_000}
	soon  = Span{2_000, 1_000}
)

// Pace gives out turns at a rate for some seconds. Safe for concurrent use.
type Pace struct {
	began   time.Time
	seconds float64
	rate    float64
	taken   atomic.Int64
}

// Turn waits until the next `count` messages may be sent; false: it is over.
func (p *Pace) Turn(count int64) bool {
	first := p.taken.Add(count) - count
	if p.rate > 0 {
		if wait := time.Until(p.began.Add(time.Duration(float64(first) / p.rate * 1e9))); wait > 0 {
			time.Sleep(wait)
		}
	}
	return time.Since(p.began).Seconds() < p.seconds
}

// tell prints a word, and waits for the answer: a line, once the processor time of this moment has been read.
func tell(word string) {
	fmt.Println(word)
	_, err := answers.ReadString('\n')
	Must(err)
}

var answers = bufio.NewReader(os.Stdin)

// Produce sends while the pace gives turns, and returns when all is answered.
type Produce func(pace *Pace, due Span)

// Run is the course of every load program: a warm-up, then what is measured, between the lines BEGIN and END.
func Run(arguments Arguments, tally *Tally, produce Produce) {
	due, warm := later, 0.0
	deliver := arguments.Case == "deliver"
	if deliver {
		due, warm = soon, arguments.Rate
		if warm == 0 {
			warm = warmRate
		}
	}
	produce(&Pace{began: time.Now(), seconds: min(warmSeconds, arguments.Seconds), rate: warm}, due)
	if deliver {
		tally.drained()
	}
	tell("BEGIN")
	tally.begin()
	began := time.Now()
	produce(&Pace{began: began, seconds: arguments.Seconds, rate: arguments.Rate}, due)
	sent := time.Since(began).Seconds()
	if deliver {
		tally.drained()
	}
	tell("END")
	result := map[string]any{
		"accepted":     tally.acceptedCount.Load(),
		"failed":       tally.failedCount.Load(),
		"sent_s":       sent,
		"delivered":    tally.deliveredCount.Load(),
		"repeats":      tally.repeatedCount.Load(),
		"missing":      int64(0),
		"late_ms":      tally.late,
		"arrived_10ms": tally.arrived,
	}
	if deliver {
		result["missing"] = tally.missing()
	}
	tally.lock.Lock()
	defer tally.lock.Unlock()
	text, err := json.Marshal(result)
	Must(err)
	fmt.Println("RESULT", string(text))
}
